"""The announcements of ranks that save in one process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from raypp.state.checkpoint.announce import Announcements


class InOneProcess(Announcements):
    """Keeps what the ranks of one attempt announce; a patient one waits for what is missing."""

    def __init__(self, *, patient: bool = True) -> None:
        self.messages: dict[tuple[int, int], dict[str, Any]] = {}
        self._patient = patient

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        self.messages[step, rank] = message

    def progress(self, *_: Any) -> None: ...

    def forget(self, *_: Any) -> None: ...

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False, *_: Any
    ) -> dict[int, dict[str, Any]]:
        end = time.monotonic() + timeout_s * self._patient
        while silent := [rank for rank in ranks if (step, rank) not in self.messages]:
            if stopped() or time.monotonic() >= end:
                raise TimeoutError(f"ranks {silent} did not report in time that their part of step {step} is stored")
            time.sleep(0.005)
        return {rank: self.messages[step, rank] for rank in ranks}
