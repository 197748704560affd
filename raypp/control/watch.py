"""Noticing that an attempt stands still, and saying which rank did first.

Every rank marks what it does (each action of the schedule, each phase of its start) and tells how long ago the last
mark was. A rank that is frozen, or whose host is, tells nothing at all.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_START_LIMIT_S = 600.0
_NEWS_DUE_S = 5.0  # ranks tell four times a second; a loaded machine may be late
_SLOW_STEPS = 10.0
_OWN_LIMIT = ("finish",)  # waiting for the last upload, which has a time limit of its own


@dataclass
class _Sign:
    """The last sign of life of one rank."""

    heard: float
    phase: str = "starting"
    idle_s: float = 0.0


@dataclass(frozen=True)
class Stall:
    """An attempt that stands still: the rank that stopped first, and what to tell."""

    rank: int
    cause: str
    details: str


class HangWatch:
    """Watches the ranks of one attempt.

    Args:
        labels: Each rank's place, in rank order.
        timeout_s: recovery.hang_timeout_s: longest a step may stand still. It grows with slow steps, and does not
            hold before the first step, which builds, loads and connects.
        now: Seconds, by a clock that does not jump.
    """

    def __init__(self, labels: list[str], timeout_s: float, now: float) -> None:
        self._labels = labels
        self._timeout_s = timeout_s
        self._signs = [_Sign(now) for _ in labels]
        self._steps: deque[float] = deque(maxlen=20)

    def heard(self, rank: int, phase: str, idle_s: float, now: float) -> None:
        """A rank told what it does, and since when."""
        self._signs[rank] = _Sign(now, phase, idle_s)

    def step_took(self, seconds: float) -> None:
        self._steps.append(seconds)

    def limit_s(self) -> float:
        """How long a rank may stand still now."""
        if not self._steps:
            return max(_START_LIMIT_S, self._timeout_s)
        return max(self._timeout_s, _SLOW_STEPS * statistics.median(self._steps))

    def stalled(self, now: float) -> Stall | None:
        """The stall, when there is one.

        A rank that waits for a peer stopped after it, so the one that has stood longest is named; a rank that has
        fallen silent altogether comes before all others.
        """
        limit = self.limit_s()
        silent = [rank for rank, sign in enumerate(self._signs) if now - sign.heard > limit + _NEWS_DUE_S]
        still = [rank for rank in range(len(self._signs)) if self._still_s(rank, now) > limit]
        if not silent and len(still) < len(self._signs):
            return None  # a rank that moves may free the others
        first = max(silent or still, key=lambda rank: self._still_s(rank, now))
        if self._signs[first].phase in _OWN_LIMIT:
            return None
        what = "told nothing" if first in silent else f"did not move from `{self._signs[first].phase}`"
        cause = f"{what} for {self._still_s(first, now):.0f} s (allowed: {limit:.0f} s)"
        return Stall(first, cause, "\n".join(self._row(rank, now) for rank in range(len(self._signs))))

    def _still_s(self, rank: int, now: float) -> float:
        sign = self._signs[rank]
        return sign.idle_s + now - sign.heard

    def _row(self, rank: int, now: float) -> str:
        return f"{self._labels[rank]}: `{self._signs[rank].phase}` since {self._still_s(rank, now):.0f} s"
