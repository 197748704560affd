"""Sets up a worker process for a seat: environment, logging, process title, SIGTERM."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raypp.environment import NCCL_OF_TORCH
from raypp.records import Seat

log = logging.getLogger("raypp")


def set_seat_environment(seat: Seat) -> None:
    """Sets the variables that torchrun sets, starts logging to this process' log, and logs the
    seat."""
    environment = {
        "RANK": seat.rank,
        "WORLD_SIZE": seat.world_size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_world_size,
        "GROUP_RANK": seat.node_rank,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": seat.master_port,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    for key, setting in NCCL_OF_TORCH.items():
        os.environ.setdefault(key, setting)  # the job's resources.env may say otherwise
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    log.setLevel(logging.INFO)
    log.info(
        "rank %d of %d is %s on %s, pid %d, device %s:%d, %s threads, attempt %d",
        seat.rank, seat.world_size, seat.label, seat.node, os.getpid(), seat.device, seat.device_index,
        os.environ.get("OMP_NUM_THREADS"), seat.attempt,
    )  # fmt: skip


@contextlib.contextmanager
def process_title(title: str) -> Iterator[None]:
    """Holds the process title. Ray would set its own around every method call."""
    module: Any = importlib.import_module("ray._raylet")
    set_title = module.setproctitle
    set_title(title)
    module.setproctitle = lambda _title: None
    try:
        yield
    finally:
        module.setproctitle = set_title


def on_sigterm(save: Callable[[], bool]) -> None:
    """Installs a SIGTERM handler: clouds and operators announce with it that a machine is about to
    end.

    Args:
        save: Called on SIGTERM; returns whether a rank is running, which then saves and leaves.
            Otherwise the handler that was there before (Ray's) runs.
    """
    try:
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            if save():
                return
            if callable(before):
                before(number, frame)
            else:
                os._exit(128 + number)

        signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: Ray's own handler stays
        log.warning("rank processes end at once on SIGTERM here")
