"""Cores that come back slow from a wait, as virtual machines' do: what it adds to a simulated step.

While a core halts, its host may give it to others. When it returns, its caches are cold and its
clock is low. So an action that begins after a wait takes longer than the same one after another
action. After a wait the core is slower by a fraction until it has lost a number of seconds; both
depend on how long it waited.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class SlowStart:
    """How a core comes back from a wait of one length.

    Attributes:
        wait_s: The length of the wait.
        slower: By which fraction actions take longer at first; 0: the core is at full speed.
        lost_s: Seconds that it loses in all before it is at full speed.
    """

    wait_s: float
    slower: float
    lost_s: float


@dataclass(frozen=True)
class SlowStarts:
    """How a core comes back from waits of any length: between the known ones, in proportion.

    Attributes:
        known: By length of the wait, ascending, no two equal.
    """

    known: Sequence[SlowStart]

    @classmethod
    def of(cls, known: Iterable[SlowStart]) -> Self | None:
        """Returns the slow starts, in any order; None if the core always comes back at full speed.

        Of two with the same wait the last one counts.
        """
        by_wait = {one.wait_s: one for one in known if one.wait_s > 0}
        found = [by_wait[wait_s] for wait_s in sorted(by_wait)]
        return cls(found) if any(one.slower > 0 and one.lost_s > 0 for one in found) else None

    def after(self, waited: float) -> tuple[float, float]:
        """Returns `slower` and `lost_s` after a wait; after one longer than are known, the last."""
        known = self.known
        above = bisect_right(known, waited, key=lambda one: one.wait_s)
        if above == len(known):
            return known[-1].slower, known[-1].lost_s
        upper = known[above]
        lower = known[above - 1] if above else SlowStart(0.0, 0.0, 0.0)
        share = (waited - lower.wait_s) / (upper.wait_s - lower.wait_s)
        slower = lower.slower + share * (upper.slower - lower.slower)
        return slower, lower.lost_s + share * (upper.lost_s - lower.lost_s)

    def at_full_speed(self, waited: float, seconds: float) -> float:
        """Returns what an action that took `seconds` after a wait takes on a core at full speed."""
        slower, lost = self.after(waited)
        return max(seconds - lost, seconds / (1 + slower))


class SlowCores:
    """The cores of all ranks during a simulation.

    Args:
        starts: How a core comes back from a wait.
        ranks: How many cores there are.
    """

    def __init__(self, starts: SlowStarts, ranks: int) -> None:
        self._starts = starts
        self._slower, self._to_lose = [0.0] * ranks, [0.0] * ranks

    def seconds(self, rank: int, waited: float, seconds: float) -> float:
        """Returns the seconds of a rank's next action.

        Args:
            rank: The rank.
            waited: Seconds that it has waited before this action.
            seconds: Those of the action at full speed.
        """
        if waited > 0:
            slower, lost = self._starts.after(waited)
            if lost > self._to_lose[rank]:
                self._slower[rank], self._to_lose[rank] = slower, lost
        if not self._to_lose[rank]:
            return seconds
        more = min(self._to_lose[rank], seconds * self._slower[rank])
        self._to_lose[rank] -= more
        return seconds + more
