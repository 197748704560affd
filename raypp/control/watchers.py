"""What the leader looks after while there is an attempt: hangs, preemptions and spares. The mesh is
another such thing (`ElasticSizing`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from raypp.control.attempt import Attempt
from raypp.control.machine import Machine, MachineEvent, RankFailed, RunPhase
from raypp.control.placement import Placement
from raypp.control.postmortem import collect_stacks
from raypp.control.ray_nodes import draining_nodes
from raypp.control.report.intake import ReportIntake
from raypp.control.report.processing import ReportProcessing
from raypp.control.run_record import RunRecord
from raypp.control.seats import Rank
from raypp.control.worker_group import WorkerGroup
from raypp.failure_kinds import FailureKind
from raypp.records import Event, EventKind, RankFailure


@dataclass(frozen=True)
class Turn:
    """What there is to look at in a turn of the leader.

    Attributes:
        now: Seconds of a monotonic clock.
    """

    machine: Machine
    attempt: Attempt
    workers: WorkerGroup
    placement: Placement
    intake: ReportIntake
    reports: ReportProcessing
    record: RunRecord
    now: float = field(default_factory=lambda: time.monotonic())

    @property
    def training(self) -> bool:
        """Whether ranks are training."""
        return self.machine.phase is RunPhase.RUNNING

    def event(self, kind: EventKind, rank: Rank, message: str, **details: Any) -> Event:
        """Returns an event of a rank."""
        return Event(kind, message, attempt=self.attempt.number, rank=rank.rank, node=rank.node, details=details)


class Watcher(Protocol):
    """Looks after one thing."""

    def check(self, turn: Turn) -> MachineEvent | None:
        """Returns what the machine must know; called in every turn while there is an attempt."""
        ...


class Hangs:
    """Ends an attempt that makes no progress, and records the stacks of its ranks."""

    def check(self, turn: Turn) -> RankFailed | None:
        watch = turn.reports.watch
        if watch is None or not turn.training or watch.is_paused(turn.now):
            return None
        stall = watch.stalled(turn.now)
        if stall is None:
            return None
        ranks, first = turn.attempt.ranks, stall.rank or 0
        for rank, text in collect_stacks(ranks, turn.workers, first).items():
            message = f"the stacks of {ranks[rank].label} (rank {rank}) on {ranks[rank].node}, pid {ranks[rank].pid}"
            turn.record.event(turn.event("stacks", ranks[rank], message, stacks=text))
        failure = ranks[first].failure(FailureKind.HUNG, stall.cause, stall.details)
        if stall.rank is None:
            failure = replace(failure, rank=-1, label="", node="", pid=0)
        return RankFailed(failure)


class Spares:
    """Keeps idle processes and devices for ranks that will be lost.

    Args:
        is_full_size: Whether the run has every rank it can have.
    """

    def __init__(self, is_full_size: Callable[[Machine], bool]) -> None:
        self._is_full_size = is_full_size

    def check(self, turn: Turn) -> None:
        if turn.reports.stepped:  # not before the first step: starting ranks need the processors
            turn.workers.start_standbys()
            if self._is_full_size(turn.machine):
                turn.placement.hold_spares()
        for kind, message in turn.placement.spares.take_events():
            turn.record.event(Event(kind, message, attempt=turn.machine.attempt))


LAST_SAVE_S = 25.0
"""Time for the last checkpoint when the notice names no deadline; clouds give 30 s and more."""
_CHECK_EVERY_S = 2.0
_MARGIN_S = 5.0


@dataclass
class PreemptionNotices:
    """The preemption notices of the current attempt; the first one counts."""

    _rank: Rank | None = None
    _why: str = ""
    _deadline: float = 0.0
    _committed: int | None = None
    _node_drained: bool = False
    _checked_at: float = field(default_factory=time.monotonic)

    def check_nodes(self, ranks: Sequence[Rank], now: float) -> tuple[Rank, str, float] | None:
        """Returns the first rank on a node that Ray drains, the reason, and the seconds it has
        left.

        Asks Ray every two seconds, until there is a notice.
        """
        if self._rank is not None or now - self._checked_at < _CHECK_EVERY_S:
            return None
        self._checked_at = now
        draining = draining_nodes()
        for rank in ranks:
            if rank.node_id in draining:
                self._node_drained = True
                left = draining[rank.node_id] / 1e3 - time.time() if draining[rank.node_id] else LAST_SAVE_S
                return rank, f"Ray drains its node {rank.node}", max(1.0, min(left - _MARGIN_S, 600.0))
        return None

    def add(self, rank: Rank, why: str, deadline: float, committed: int | None) -> None:
        """Records a notice, unless there is one.

        Args:
            deadline: When the rank must have left.
            committed: The newest committed step now.
        """
        if self._rank is None:
            self._rank, self._why, self._deadline, self._committed = rank, why, deadline, committed

    def due_failure(self, now: float, committed: int | None) -> RankFailure | None:
        """Returns the failure that ends the attempt, once the last checkpoint exists or the
        deadline has passed."""
        if self._rank is None or self._rank.ended:
            return None
        saved = committed is not None and committed != self._committed
        if not saved and now < self._deadline:
            return None
        how = f"after a checkpoint at step {committed}" if saved else "without a new checkpoint; there was no time"
        return self._rank.failure(FailureKind.PREEMPTED, f"{self._why}; left {how}")

    def check(self, turn: Turn) -> RankFailed | None:
        """Asks for a last checkpoint when a node is drained, and ends the attempt afterwards,
        without counting it as failed."""
        notice = self.check_nodes(turn.attempt.ranks, turn.now)
        if notice is not None:
            rank, why, left_s = notice
            message = f"{rank.label} (rank {rank.rank}) on {rank.node}: {why}; saving a checkpoint before it leaves"
            turn.record.event(turn.event("preemption_notice", rank, message))
            self.add(rank, why, turn.now + left_s, turn.machine.committed_step)
            turn.intake.save_wanted = True
        failure = self.due_failure(turn.now, turn.machine.committed_step)
        return RankFailed(failure) if failure is not None and turn.training else None

    def reset(self) -> bool:
        """Forgets the notice at the end of the attempt; returns whether a node of it drains and its
        bundles must move."""
        drained, self._rank, self._node_drained = self._node_drained, None, False
        return drained
