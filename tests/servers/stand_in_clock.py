"""A clock that stands still until it is told to go on: takes the place of the module `time` in a
test."""

from __future__ import annotations

import threading


class StandInClock:
    """What a module asks of `time`.

    Attributes:
        now: Seconds since the clock was made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 1e-6))  # less might change nothing, and a loop would wait for ever

    def advance(self, seconds: float) -> None:
        """Lets the seconds pass at once."""
        with self._lock:
            self.now += seconds
