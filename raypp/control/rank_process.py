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

from raypp.records import Seat

log = logging.getLogger("raypp")

# A process outlives the failure of a communicator and takes a seat in the next attempt, and raypp's
# own watch decides what hangs. With torch's defaults its threads end the process by SIGABRT.
NCCL_OF_TORCH = {
    # 2: abort the communicators after an error. 1: also end the process. 3, the default: only end
    # it. 0: do nothing, so that kernels wait for dead peers.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # 0: do not end the process when the watchdog makes no progress for 8 minutes, or 8 minutes
    # after another rank has asked for a dump.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # 0: do not end the process when the watchdog's thread meets a CUDA error. The rank's own thread
    # meets it, too, and reports it.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # No dump of recent collectives to /tmp after an error, and no wait (4 times this many ms) for
    # it before the communicators are aborted.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Variables of a rank's process, unless the job's `resources.env` sets them."""


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
