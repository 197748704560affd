"""Processes we started and must end exactly: known by pid and start time, because pids are used again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class OwnProcess:
    """A process of ours.

    Attributes:
        pid: Its process id.
        started: When it started, seconds since 1970; tells it from a later process with the same pid.
    """

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> OwnProcess:
        """The process that has this pid now.

        Raises:
            ProcessLookupError: There is none.
        """
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"no process {pid}") from None

    def find(self) -> psutil.Process | None:
        """The living process, or None when it is gone (also when another has its pid now)."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 0.5 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process

    def end(self, patience_s: float) -> None:
        """Ends it and its children: SIGTERM, after `patience_s` SIGKILL. Returns when all are gone."""
        process = self.find()
        if process is None:
            return
        family = [process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
            process.terminate()
        _, stubborn = psutil.wait_procs(family, timeout=patience_s)
        for one in stubborn:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(stubborn, timeout=5)


def wait_until(condition: Callable[[], object], timeout_s: float, interval_s: float = 0.1) -> bool:
    """Asks `condition()` until it is true; False when the time is over."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(interval_s)
    return True
