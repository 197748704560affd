"""Processes that raypp must find again, identified by pid and start time: pids are reused."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class OwnProcess:
    """A process that raypp started, or that started raypp. `pid`: its process id. `started`: when
    it started, in seconds; distinguishes it from a later process with the same pid. On Linux, from
    the start of the machine: counted from 1970, it would change with each step of the clock."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> OwnProcess:
        """Returns the process that has this pid now. Raises ProcessLookupError: there is none."""
        try:
            return cls(pid, _started(psutil.Process(pid)))
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"no process {pid}") from None

    def find(self) -> psutil.Process | None:
        """Returns the live process; None if it is gone, even if another process has its pid."""
        try:
            process = psutil.Process(self.pid)
            if abs(_started(process) - self.started) > 0.5 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process

    def end(self, patience_s: float) -> None:
        """Ends it and its children: SIGTERM, then SIGKILL after `patience_s`. Waits for all."""
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


def _started(process: psutil.Process) -> float:
    boot_time = psutil.boot_time() if psutil.LINUX else 0.0  # first: psutil before 7.1 remembers it
    return float(process.create_time() - boot_time)
