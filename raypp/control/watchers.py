"""What the leader watches in an attempt: hangs, preemptions, spares (mesh: `ElasticSizing`)."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from raypp.control.attempt import Attempt
from raypp.control.machine import Machine, MachineEvent, RankFailed
from raypp.control.placement import Placement
from raypp.control.postmortem import collect_flight_records, collect_stacks
from raypp.control.process_evidence import MOST_CHARACTERS
from raypp.control.ray_state import draining_nodes
from raypp.control.recovery.hang_analysis import pending, stuck_collectives
from raypp.control.report.reports import Reports
from raypp.control.run_record import RunRecord
from raypp.control.seats import Rank
from raypp.control.worker_group import WorkerGroup
from raypp.failure_kinds import FailureKind
from raypp.records import Event, EventKind

_LAST_SAVE_S = 25.0
"""Time for the last checkpoint when the notice names no deadline; clouds give 30 s and more."""
_ASK_EVERY_S = 2.0
_MARGIN_S = 5.0


@dataclass(frozen=True)
class Turn:
    """What there is to look at in a turn of the leader. `now`: seconds of a monotonic clock."""

    machine: Machine
    attempt: Attempt
    workers: WorkerGroup
    placement: Placement
    reports: Reports
    record: RunRecord
    now: float = field(default_factory=lambda: time.monotonic())

    def event(self, kind: EventKind, rank: Rank, message: str, **details: Any) -> Event:
        return Event(kind, message, attempt=self.attempt.number, rank=rank.rank, node=rank.node, details=details)


class Watcher(Protocol):
    """Looks after one thing."""

    def check(self, turn: Turn) -> MachineEvent | None:
        """Returns what the machine must know; called in every turn while there is an attempt."""


class Hangs:
    """Ends an attempt that makes no progress, and records the stacks of its ranks. Without a
    culprit, it also records what torch knows of their collectives."""

    def check(self, turn: Turn) -> RankFailed | None:
        watch = turn.reports.watch
        if watch is None or not turn.machine.training or watch.is_paused(turn.now):
            return None
        stall = watch.stalled(turn.now)
        if stall is None:
            return None
        ranks, first = turn.attempt.ranks, stall.rank or 0
        records = collect_flight_records(ranks) if stall.rank is None else {}
        for rank, text in collect_stacks(ranks, turn.workers, first).items():
            more = {"collectives": json.dumps(pending(records[rank]))[:MOST_CHARACTERS]} if rank in records else {}
            message = f"the stacks of {ranks[rank].label} (rank {rank}) on {ranks[rank].node}, pid {ranks[rank].pid}"
            turn.record.event(turn.event("stacks", ranks[rank], message, stacks=text, **more))
        if stall.rank is None:
            told = stuck_collectives(records, {rank.rank: rank.label for rank in ranks})
            stall = replace(stall, cause=f"{stall.cause}; {told[0]}", details="\n".join((stall.details, *told)))
        failure = ranks[first].failure(FailureKind.HUNG, stall.cause, stall.details)
        if stall.rank is None:
            failure = replace(failure, rank=-1, label="", node="", pid=0)
        return RankFailed(failure)


class Spares:
    """Keeps idle processes and devices for ranks that will be lost, while `is_full_size`."""

    def __init__(self, is_full_size: Callable[[Machine], bool]) -> None:
        self._is_full_size = is_full_size

    def check(self, turn: Turn) -> None:
        if turn.reports.stepped:  # not before the first step: starting ranks need the processors
            turn.workers.start_standbys(turn.placement.next_nodes())
            if self._is_full_size(turn.machine):
                turn.placement.hold_spares()
        for kind, message in turn.placement.spares.take_events():
            turn.record.event(Event(kind, message, attempt=turn.machine.attempt))


class Preemptions:
    """Saves once more before a rank's process or node goes, then ends the attempt, which does not
    count as failed. The first notice in an attempt counts."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._rank: Rank | None = None
        self._why = ""
        self._deadline = 0.0
        self._committed: int | None = None
        self._drained = False

    def check(self, turn: Turn) -> RankFailed | None:
        if self._rank is None:
            self._look(turn)
        committed = turn.machine.committed_step
        saved = committed not in (None, self._committed)
        due = turn.machine.training and (saved or turn.now >= self._deadline)
        if self._rank is None or self._rank.ended or not due:
            return None
        how = f"after a checkpoint at step {committed}" if saved else "without a new checkpoint; there was no time"
        return RankFailed(self._rank.failure(FailureKind.PREEMPTED, f"{self._why}; left {how}"))

    def _look(self, turn: Turn) -> None:
        rank, self._why, left_s = turn.reports.preempted, "it received SIGTERM", _LAST_SAVE_S
        if rank is None:
            if turn.now - self._asked_at < _ASK_EVERY_S:
                return
            self._asked_at, draining = turn.now, draining_nodes()
            rank = next((one for one in turn.attempt.ranks if one.node_id in draining), None)
            if rank is None:
                return
            self._drained, self._why = True, f"Ray drains its node {rank.node}"
            deadline_ms = draining[rank.node_id]
            left_s = (deadline_ms / 1e3 - time.time() if deadline_ms else _LAST_SAVE_S) - _MARGIN_S
            left_s = max(1.0, min(left_s, 600.0))
            place = f"{rank.label} (rank {rank.rank}) on {rank.node}"
            message = f"{place}: {self._why}; saving a checkpoint before it leaves"
            turn.record.event(turn.event("preemption_notice", rank, message))
        self._rank, self._deadline, self._committed = rank, turn.now + left_s, turn.machine.committed_step
        turn.reports.save_wanted = True

    def reset(self) -> bool:
        """Forgets the notice at the attempt's end; returns whether bundles must leave its node."""
        drained, self._rank, self._drained = self._drained, None, False
        return drained
