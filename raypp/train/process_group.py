"""Joining an attempt: rendezvous, process group, device, from a seat alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from raypp.records import Seat

log = logging.getLogger(__name__)

# The first step may compile and connect; a peer that died is noticed by its closed connection, not by this.
_STARTUP_S = 300.0


def pick_device(seat: Seat) -> torch.device:
    """The seat's device, made current; also how many threads a CPU rank computes with (OMP_NUM_THREADS, else 1)."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if seat.device == "cuda":
        torch.cuda.set_device(seat.device_index)
        return torch.device("cuda", seat.device_index)
    return torch.device("cpu")


@contextmanager
def joined(seat: Seat, hang_timeout_s: float) -> Iterator[dist.TCPStore]:
    """Joins the attempt's process group and leaves it at the end. Collective over the world.

    CPU tensors always travel by gloo, also beside NCCL: what ranks agree on each step needs no device.

    Yields:
        The attempt's key-value store; rank 0 serves it, unless torchrun's agent does.
    """
    if seat.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", seat.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", seat.interface)
    backend = "cpu:gloo,cuda:nccl" if seat.device == "cuda" else "gloo"
    timeout = timedelta(seconds=max(_STARTUP_S, hang_timeout_s))
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        seat.master_addr,
        seat.master_port,
        seat.world_size,
        is_master=seat.rank == 0 and not agent_serves,
        timeout=timeout,
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{seat.run}/attempt-{seat.attempt}", store),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timeout,
    )
    log.info(
        "rank %d of %d (%s) joined by %s at %s:%d over %s",
        seat.rank, seat.world_size, seat.label, backend, seat.master_addr, seat.master_port,
        os.environ.get("GLOO_SOCKET_IFNAME", "the default interface"),
    )  # fmt: skip
    try:
        yield store
    finally:
        dist.destroy_process_group()
