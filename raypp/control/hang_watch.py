"""Detects that an attempt hangs, and names the rank it waits for. Every rank marks what it does
(each action of the schedule, each wait, each phase of its start) and reports how long ago the last
mark was. A frozen rank, or one on a frozen host, reports nothing.
`raypp.control.recovery.hang_analysis` works out which rank is to blame."""

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypp.control.recovery.hang_analysis import RankActivity, activity_table, find_culprit
from raypp.control.report.reporter import interval_s
from raypp.control.seats import Rank

log = logging.getLogger(__name__)

_START_LIMIT_S = 600.0
_PAUSED_S = 5.0  # a turn takes at most a second or two
_HEARTBEAT_DUE_S = 5.0  # beyond the time between two; a loaded machine may be late
_SLOW_STEPS = 10.0
_SLOW_STORE = 10.0  # a rank may wait this many times as long for the upload before its own
_GAPS_KEPT = 20
_ENDED = "ended"  # the last thing a rank reports; its process then tells the controller how it ended
_OWN_LIMIT = ("finish", _ENDED)  # waits for the last upload, which has its own time limit


@dataclass(frozen=True)
class Stall:
    """A hang: the rank that the attempt waits for, None if unknown; the text of the failure."""

    rank: int | None
    cause: str
    details: str


class HangWatch:
    """Watches the ranks of one attempt. `ranks`: in rank order. `timeout_s`:
    recovery.hang_timeout_s: how long a step may make no progress. It grows with slow steps, and
    does not hold before the first step, which builds, loads, compiles and connects. `now`: seconds
    of a monotonic clock. `rank_of_stage`: pipeline rank of every stage."""

    def __init__(self, ranks: Sequence[Rank], timeout_s: float, now: float, rank_of_stage: Sequence[int] = ()) -> None:
        self._rank_of_stage = rank_of_stage
        self._timeout_s = timeout_s
        self._listened_at = now
        self._due_s = _HEARTBEAT_DUE_S + interval_s(len(ranks))
        self._activities = [
            RankActivity(one.rank, one.label, one.coordinates, "starting", 0.0, one.node, one.pid) for one in ranks
        ]
        """As of each rank's last heartbeat."""
        self._heartbeat_at = [now for _ in ranks]
        self._steps: deque[float] = deque(maxlen=20)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)

    def add_heartbeat(
        self, rank: int, phase: str, idle_s: float, now: float, inside: str = "", reached: int = 0
    ) -> None:
        idle_s -= sum(max(0.0, min(end, now) - max(begin, now - idle_s)) for begin, end in self._gaps)
        activity = self._activities[rank]
        self._activities[rank] = replace(activity, phase=phase, idle_s=idle_s, inside=inside, reached=reached)
        self._heartbeat_at[rank] = now

    def listen(self, now: float) -> None:
        """Leaves out a long time in which no reports were taken; some are about to be."""
        gap_s, self._listened_at = now - self._listened_at, now
        if gap_s > _PAUSED_S:
            log.warning("took no reports for %.1f s, which do not count as a hang", gap_s)
            self.skip(gap_s, now)

    def is_paused(self, now: float) -> bool:
        """Returns whether reports wait to be taken since a pause."""
        return now - self._listened_at > _PAUSED_S

    def skip(self, gap_s: float, now: float) -> None:
        """Leaves out the last `gap_s` seconds, in which no report could be taken. They count
        neither as silence nor as idleness: whatever kept this process from its work, for example a
        pause of the whole machine, may have kept the ranks from theirs."""
        self._gaps.append((now - gap_s, now))
        self._heartbeat_at = [min(at + gap_s, now) for at in self._heartbeat_at]

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def limit_s(self) -> float:
        """Returns how long a rank may make no progress now."""
        if not self._steps:
            return max(_START_LIMIT_S, self._timeout_s)
        return max(self._timeout_s, _SLOW_STEPS * statistics.median(self._steps))

    def stalled(self, now: float) -> Stall | None:
        """Returns the hang: no rank made progress for long, or one is silent; None without one."""
        limit = self.limit_s()
        ranks = range(len(self._activities))
        silent = [rank for rank in ranks if self._overdue(rank, now - limit)]
        if not silent and not all(self._is_idle(rank, now, limit) for rank in ranks):
            return None  # a rank that makes progress may free the others
        # All are idle. A rank whose heartbeat is overdue does not merely wait.
        silent = silent or [rank for rank in ranks if self._overdue(rank, now)]
        activities = [
            replace(one, idle_s=self._idle_s(one.rank, now), silent=one.rank in silent) for one in self._activities
        ]
        blame = find_culprit(activities, self._rank_of_stage)
        if blame.rank is not None:
            phase = activities[blame.rank].phase.partition(" ")[0]
            if phase in _OWN_LIMIT and blame.rank not in silent:
                return None
            if phase == "save" and self._idle_s(blame.rank, now) <= _SLOW_STORE * limit:
                return None
        return Stall(blame.rank, f"{blame.cause} (allowed: {limit:.0f} s)", activity_table(activities))

    def _is_idle(self, rank: int, now: float, limit: float) -> bool:
        """Returns whether a rank reports that it has been idle for longer than the limit, or its
        heartbeat is overdue. Between the two its activity is unknown: its last mark may be old, and
        a verdict would take a frozen rank for one that waits where it last reported."""
        return self._activities[rank].idle_s > limit or (self._overdue(rank, now) and self._idle_s(rank, now) > limit)

    def _overdue(self, rank: int, now: float) -> bool:
        due_s = _START_LIMIT_S if self._activities[rank].phase == _ENDED else self._due_s
        return now - self._heartbeat_at[rank] > due_s

    def _idle_s(self, rank: int, now: float) -> float:
        return self._activities[rank].idle_s + now - self._heartbeat_at[rank]
