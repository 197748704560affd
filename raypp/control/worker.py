"""The actor that is one rank. The only place of the control plane that reaches the runtime."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import ray

from raypp.control.messages import Presence
from raypp.control.private import load_private_environment
from raypp.control.reporting import ControllerReporter
from raypp.errors import DataError, JobError, RayppError, UnreachableError
from raypp.records import NodeFacts, RankFailure, RankResult, Reporter, Seat
from raypp.spec.job import Job

RankFunction = Callable[[Job, Seat, Reporter], RankResult]


class Worker:
    """One rank's process. Ray calls its methods in threads of their own; `run` takes as long as the attempt.

    Args:
        run: The run's name.
        label: The coordinates planned for it; the seat it gets later has the same.
        environment: The job's `resources.env`.
        rank_function: `module:function` in place of the real rank.
    """

    def __init__(self, run: str, label: str, environment: dict[str, str], rank_function: str | None = None) -> None:
        self._name = f"raypp/{run}/{label}"
        self._label = label
        self._rank_function = rank_function
        load_private_environment()
        os.environ.update(environment)
        # Importing torch takes longer than all else that happens before the first seat is given out.
        threading.Thread(target=self._import_early, daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    def where(self) -> Presence:
        """Where this process is, and a port of its node that is free now."""
        context = ray.get_runtime_context()
        ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        devices = context.get_accelerator_ids().get("GPU", [])
        facts = NodeFacts(
            node_id=context.get_node_id(),
            ip=ip,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            interface=interface_of(ip),
            device_index=int(devices[0]) if devices else 0,
        )
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return Presence(facts, probe.getsockname()[1])

    def run(self, job: dict[str, Any], seat: Seat, life: str, controller: Any) -> RankResult | RankFailure:
        """Lives a rank's life in the seat given; returns how it ended, whatever happened."""
        announce_seat(seat)
        reporter = ControllerReporter(controller, seat, life)
        with _title(f"ray::{self._name}"), reporter:
            try:
                return self._load_rank()(Job.model_validate(job), seat, reporter)
            except BaseException as error:  # noqa: BLE001  whatever it is, the controller must hear of it
                traceback.print_exc()
                return failure_of(error, seat, reporter.last_step)

    def _import_early(self) -> None:
        with contextlib.suppress(Exception):  # `run` meets the same error, and reports it
            self._load_rank()

    def _load_rank(self) -> RankFunction:
        if self._rank_function is not None:
            module, _, name = self._rank_function.partition(":")
            function: RankFunction = getattr(importlib.import_module(module), name)
            return function
        from raypp.train.rank import run_rank

        return run_rank


def failure_of(error: BaseException, seat: Seat, step: int) -> RankFailure:
    """The evidence an exception leaves."""
    if type(error).__name__ == "LostPeerError":  # not imported: it lives beside torch
        kind = "lost_peer"
    elif isinstance(error, DataError | JobError):
        kind = "user_error"
    elif isinstance(error, UnreachableError):
        kind = "unknown"
    else:
        kind = "raised"
    text = str(error) if isinstance(error, RayppError) else f"{type(error).__name__}: {error}"
    return RankFailure(
        rank=seat.rank,
        label=seat.label,
        node=seat.node,
        pid=os.getpid(),
        kind=kind,
        cause=text.strip()[:2000],
        step=step,
        details="".join(traceback.format_exception(error))[-8000:],
    )


def announce_seat(seat: Seat) -> None:
    """Sets what torchrun would have set, starts logging to this process' log, and prints the seat."""
    environment = {
        "RANK": seat.rank,
        "WORLD_SIZE": seat.world_size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_world_size,
        "GROUP_RANK": seat.node_rank,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": seat.master_port,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, seat.interface)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("raypp").setLevel(logging.INFO)
    logging.getLogger("raypp").info(
        "rank %d of %d is %s on %s, pid %d, device %s:%d, interface %s, %s threads, attempt %d",
        seat.rank, seat.world_size, seat.label, seat.node, os.getpid(), seat.device, seat.device_index,
        os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("OMP_NUM_THREADS"), seat.attempt,
    )  # fmt: skip


def interface_of(ip: str) -> str:
    """The network interface that carries an address of this node; for any loopback address the loopback's.

    Raises:
        UnreachableError: No interface has it.
    """
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return str(name)
    if ip.startswith("127."):
        for name, addresses in found.items():
            if any(address.address.startswith("127.") for address in addresses):
                return str(name)
    raise UnreachableError(f"no interface of {socket.gethostname()} has Ray's address {ip}: {sorted(found)}")


@contextlib.contextmanager
def _title(title: str) -> Iterator[None]:
    """Holds the process title. Ray sets its own around every method call; ours wins until the end."""
    module: Any = importlib.import_module("ray._raylet")
    set_title = module.setproctitle
    set_title(title)
    module.setproctitle = lambda _title: None
    try:
        yield
    finally:
        module.setproctitle = set_title
