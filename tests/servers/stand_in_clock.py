"""A clock that passes only when told to: takes the place of the module `time` in a test."""

import threading
import time
from collections.abc import Callable


class StandInClock:
    """What a module asks of `time`; `now` are the seconds since the clock was made. Time `passes`
    when somebody sleeps, or `sleep` gives other threads a moment."""

    def __init__(self, passes: bool = True) -> None:
        self.now = 0.0
        self._passes = passes
        self._lock = threading.Lock()

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        if self._passes:
            self.advance(seconds)
        else:
            time.sleep(0.001)

    def advance(self, seconds: float) -> None:
        """Lets the seconds pass at once."""
        with self._lock:
            self.now += max(seconds, 1e-6)  # less might change nothing, and a loop would wait for ever


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until something holds; after a minute it never will."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)
