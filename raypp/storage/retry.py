"""How long a store that fails is asked again, and with which pauses."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from raypp.errors import JobError, Problem

LONG_S = 60.0
"""For processes that train: a server may be restarted meanwhile."""
SHORT_S = 8.0
"""For people at a terminal, who rather hear soon that nothing answers."""
_FIRST_S = 0.2
_LONGEST_S = 8.0


@dataclass(frozen=True)
class Patience:
    """Pauses that grow, each drawn at random so that many ranks do not come back at the same moment.

    Attributes:
        total_s: From the first failure on, no request is begun later than this.
        unreachable_s: The same when nothing listens at the endpoint at all.
    """

    total_s: float = LONG_S
    unreachable_s: float = SHORT_S

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try; ends when patience does. Time counts from the first `next`."""
        begun = time.monotonic()
        longest = _FIRST_S
        while True:
            left = self.total_s - (time.monotonic() - begun)
            if left <= 0:
                return
            # Half of it is certain, or a storm is met again at once.
            yield min(left, longest * random.uniform(0.5, 1.0))
            longest = min(2 * longest, _LONGEST_S)


def patience_from_environment(unreachable_s: float = SHORT_S) -> Patience:
    """The default, or what RAYPP_STORE_PATIENCE_S says (seconds, for every kind of failure).

    Raises:
        JobError: That is not a number of seconds.
    """
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    return Patience(max(LONG_S, unreachable_s), unreachable_s) if given is None else Patience(given, given)


def seconds_from_environment(name: str) -> float | None:
    """A setting in seconds; None when it is not set.

    Raises:
        JobError: It is not a number of seconds.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 <= seconds < 1e6:
            raise ValueError
    except ValueError:
        raise JobError(Problem(name, f"{text!r} is not a number of seconds", f"for example {name}=60")) from None
    return seconds
