"""Noticing that an attempt stands still, and saying who it waits for.

Every rank marks what it does (each action of the schedule, each wait, each phase of its start) and tells how long ago
the last mark was. A rank that is frozen, or whose host is, tells nothing at all. Who is to blame is worked out by
`raypp.recovery.waiting`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypp.control.seats import Rank
from raypp.recovery.waiting import Doing, find_culprit, table

_START_LIMIT_S = 600.0
_NEWS_DUE_S = 5.0  # ranks tell four times a second; a loaded machine may be late
_SLOW_STEPS = 10.0
_SLOW_STORE = 10.0  # a rank may wait so many times as long for the upload before its own
_OWN_LIMIT = ("finish",)  # waiting for the last upload, which has a time limit of its own


@dataclass
class _Sign:
    """The last sign of life of one rank."""

    heard: float
    phase: str = "starting"
    idle_s: float = 0.0
    inside: str = ""


@dataclass(frozen=True)
class Stall:
    """An attempt that stands still: the rank it waits for, and what to tell."""

    rank: int
    cause: str
    details: str


class HangWatch:
    """Watches the ranks of one attempt.

    Args:
        ranks: In rank order.
        timeout_s: recovery.hang_timeout_s: longest a step may stand still. It grows with slow steps, and does not
            hold before the first step, which builds, loads, compiles and connects.
        now: Seconds, by a clock that does not jump.
        rank_of_stage: Pipeline rank of every stage.
    """

    def __init__(self, ranks: Sequence[Rank], timeout_s: float, now: float, rank_of_stage: Sequence[int] = ()) -> None:
        self._ranks = ranks
        self._rank_of_stage = rank_of_stage
        self._timeout_s = timeout_s
        self._signs = [_Sign(now) for _ in ranks]
        self._steps: deque[float] = deque(maxlen=20)

    def heard(self, rank: int, phase: str, idle_s: float, now: float, inside: str = "") -> None:
        """A rank told at `now` what it does, and since when. What it told before is not news any more."""
        if now < self._signs[rank].heard:
            return
        self._signs[rank] = _Sign(now, phase, idle_s, inside)

    def step_took(self, seconds: float) -> None:
        self._steps.append(seconds)

    def limit_s(self) -> float:
        """How long a rank may stand still now."""
        if not self._steps:
            return max(_START_LIMIT_S, self._timeout_s)
        return max(self._timeout_s, _SLOW_STEPS * statistics.median(self._steps))

    def stalled(self, now: float) -> Stall | None:
        """The stall, when there is one: every rank has stood still for too long, or one tells nothing any more."""
        limit = self.limit_s()
        silent = [rank for rank, sign in enumerate(self._signs) if now - sign.heard > limit + _NEWS_DUE_S]
        still = [rank for rank in range(len(self._signs)) if self._stands_still(rank, now, limit)]
        if not silent and len(still) < len(self._signs):
            return None  # a rank that moves may free the others
        # All stand still: who has not even said so since the news was due is not merely waiting.
        silent = silent or [rank for rank in range(len(self._signs)) if self._overdue(rank, now)]
        doings = [self._doing(rank, now, rank in silent) for rank in range(len(self._signs))]
        blame = find_culprit(doings, self._rank_of_stage)
        phase = self._signs[blame.rank].phase.partition(" ")[0]
        if phase in _OWN_LIMIT and blame.rank not in silent:
            return None
        if phase == "save" and self._still_s(blame.rank, now) <= _SLOW_STORE * limit:
            return None
        return Stall(blame.rank, f"{blame.cause} (allowed: {limit:.0f} s)", table(doings))

    def _stands_still(self, rank: int, now: float, limit: float) -> bool:
        """Whether a rank says itself that it has stood still for so long, or its news is overdue.

        Between the two nobody knows what it does: its last mark may be of long ago, and a verdict would take a rank
        that froze for one that waits where it was last heard of.
        """
        return self._signs[rank].idle_s > limit or (self._overdue(rank, now) and self._still_s(rank, now) > limit)

    def _overdue(self, rank: int, now: float) -> bool:
        return now - self._signs[rank].heard > _NEWS_DUE_S

    def _still_s(self, rank: int, now: float) -> float:
        sign = self._signs[rank]
        return sign.idle_s + now - sign.heard

    def _doing(self, number: int, now: float, silent: bool) -> Doing:
        rank, sign = self._ranks[number], self._signs[number]
        doing = Doing(number, rank.label, rank.coordinates, sign.phase, self._still_s(number, now), rank.node, rank.pid)
        return replace(doing, silent=silent, inside=sign.inside)
