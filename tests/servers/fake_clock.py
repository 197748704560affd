"""A clock that tests set, in place of the module `time` of code that waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class FakeClock:
    """Its time passes when somebody sleeps, or when a test says so.

    Args:
        passes: Whether the time passes when somebody sleeps. If not, `sleep` gives other threads a
            moment.

    Attributes:
        now: Seconds.
    """

    def __init__(self, passes: bool = True) -> None:
        self.now = 1.0
        self._passes = passes

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        if self._passes:
            self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))
        else:
            time.sleep(0.001)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until something holds; after a minute it never will."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)
