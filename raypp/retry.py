"""Retries with growing pauses until a deadline."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """The pauses between tries. `timeout_s`: seconds from the first failure after which no try
    begins. `factor`: each pause is this many times as long as the one before. `jitter`: share of
    each pause that is drawn at random, so that many processes do not retry at the same moment.
    `tries`: most tries; 0 for as many as the time allows."""

    timeout_s: float
    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: float = 0.0
    tries: int = 0

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each further try, for `timeout_s` from the first."""
        begun, pause = time.monotonic(), self.first_s
        for number in itertools.count(1):
            left = self.timeout_s - (time.monotonic() - begun)
            if left <= 0 or number == self.tries:
                return
            yield min(left, pause * random.uniform(1.0 - self.jitter, 1.0))
            pause = min(self.factor * pause, self.longest_s)

    def call(
        self,
        function: Callable[[], T],
        may_pass: Callable[[Exception], bool],
        wait: Callable[[float], bool | None] | None = None,
    ) -> T:
        """Calls a function until it succeeds. `may_pass`: whether an exception may be temporary;
        any other is raised at once. `wait`: waits for so many seconds, and returns True to give up;
        None to sleep. Raises the last exception if it is not temporary or the time is up."""
        pauses = self.pauses()
        while True:
            try:
                return function()
            except Exception as error:
                pause = next(pauses, None) if may_pass(error) else None
                if pause is None or (wait or time.sleep)(pause):
                    raise

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Waits until a condition holds; returns False when the time is up."""
        pauses = self.pauses()
        while not condition():
            pause = next(pauses, None)
            if pause is None:
                return False
            time.sleep(pause)
        return True
