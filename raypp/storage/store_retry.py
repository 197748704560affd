"""How long requests to a failing store are retried, and with which backoff."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from raypp.errors import JobError, Problem
from raypp.retry import Backoff

LONG_S = 60.0
"""For training processes: the server may be restarted meanwhile."""
SHORT_S = 8.0
"""For commands at a terminal: users want to know soon that nothing answers."""
_FIRST_S = 0.2
_LONGEST_S = 8.0


@dataclass(frozen=True)
class Patience:
    """Exponential backoff with jitter, so that many ranks do not retry at the same moment.

    Attributes:
        total_s: No request begins later than this after the first failure.
        unreachable_s: The same if nothing listens at the endpoint at all.
    """

    total_s: float = LONG_S
    unreachable_s: float = SHORT_S

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each retry, until the time is up.

        Time counts from the first `next`.
        """
        # At least half of each pause is certain, so that retries do not hit an overloaded server at
        # once.
        return Backoff(self.total_s, _FIRST_S, _LONGEST_S, jitter=0.5).pauses()


def patience_from_environment(unreachable_s: float = SHORT_S) -> Patience:
    """Returns the default, or RAYPP_STORE_PATIENCE_S in seconds for every kind of failure.

    Raises:
        JobError: The value is not a number of seconds.
    """
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    return Patience(max(LONG_S, unreachable_s), unreachable_s) if given is None else Patience(given, given)


def seconds_from_environment(name: str) -> float | None:
    """Reads a setting in seconds; None if it is not set.

    Raises:
        JobError: The value is not a number of seconds.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 <= seconds < 1e6:
            raise ValueError
    except ValueError:
        raise JobError(Problem(name, f"{text!r} is not a number of seconds", f"set, for example, {name}=60")) from None
    return seconds
