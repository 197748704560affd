"""Ends a process of a run that has lost its controller for too long, or whose actor has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

_INTERVAL_S = 5.0
_INTERVAL_S_PER_RANK = 0.03


def ask_interval_s(ranks: int) -> float:
    """Returns the seconds between two checks of one process, so that all processes of a run
    together cost the controller the same whatever their number."""
    return max(_INTERVAL_S, _INTERVAL_S_PER_RANK * ranks)


class OrphanWatch:
    """Checks from a thread whether the run's controller still answers.

    Args:
        ask: Asks the controller; raises when it does not answer.
        timeout_s: Silence after which the process counts as orphaned.
        on_orphaned: Called once, in this object's thread.
        interval_s: Seconds between two checks, at most a quarter of `timeout_s`.
        last_answer: Returns when the controller last answered something else (`time.monotonic`); a
            recent answer saves the check.
        exit_if_ended: Called before each check; ends this process when its actor has ended.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        timeout_s: float,
        on_orphaned: Callable[[], None],
        interval_s: float = _INTERVAL_S,
        last_answer: Callable[[], float] = lambda: 0.0,
        exit_if_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._on_orphaned = on_orphaned
        self._last_answer = last_answer
        self._exit_if_ended = exit_if_ended
        self._interval_s = min(interval_s, timeout_s / 4)
        self._answered = time.monotonic()
        threading.Thread(target=self._watch, name="orphan-watch", daemon=True).start()

    def answered(self, at: float) -> None:
        """Records that the controller was heard from at that time (`time.monotonic`)."""
        self._answered = max(self._answered, at)

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_s)
            with contextlib.suppress(Exception):  # Ray may not answer
                self._exit_if_ended()
            now = time.monotonic()
            self.answered(self._last_answer())
            if now - self._answered < self._interval_s:
                continue
            try:
                self._ask()
            except Exception:  # noqa: BLE001  restarting, or gone for good: only time shows which
                if time.monotonic() - self._answered > self._timeout_s:
                    self._on_orphaned()
                    return
                continue
            self._answered = time.monotonic()
