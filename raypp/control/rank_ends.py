"""How the ranks of one attempt end: awaits their results, and finds the cause of each failure."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypp.control.postmortem import cause_of_worker_death, raylet_death
from raypp.control.protocol import RankEnd, ReportBatch
from raypp.control.seats import Rank
from raypp.control.worker_group import WorkerGroup
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure, RankResult

_WITNESS_GRACE_S = 1.0
_PROBE_NODE_S = 2.0
_OUTCOME_S = 30.0
_OUTCOME_S_PER_RANK = 3.0
_FEW_RANKS = 64


@dataclass
class RankEnds:
    """Awaits ranks' ends. `on_unwritten`: gets reports that an ended rank could not send."""

    attempt: int
    ranks: list[Rank]
    workers: WorkerGroup
    on_unwritten: Callable[[ReportBatch], None]
    explained: bool = False
    """A failure is known that is more than the loss of a peer."""
    examine: bool = True
    """Find the cause of death of a process; not of those that the attempt ends itself."""
    _witnessed_at: float | None = None
    _held: list[RankFailure] = field(default_factory=list)
    _probed: dict[str, float] = field(default_factory=dict)
    """When the raylet of each node was last probed."""

    def await_end(self, rank: Rank) -> None:
        """Asks a rank's process for its end, in the background."""
        rank.pending = rank.actor.outcome.remote(self.attempt, outcome_timeout_s(len(self.ranks)))

    def hold(self, failure: RankFailure) -> None:
        """Adds a failure to those that `failures` returns."""
        self._held.append(failure)

    def failures(self, timeout_s: float) -> list[RankFailure]:
        """Returns new failures, waiting up to `timeout_s` for one. Failures of ranks that only lost
        a peer are held back for a while: the cause is often known a little later."""
        self._held += self.collect(timeout_s)
        if not self._held:
            return []
        now = time.monotonic()
        self._witnessed_at = self._witnessed_at or now
        explained = any(not failure.kind.traits.witness for failure in self._held)
        if not explained and now - self._witnessed_at < _WITNESS_GRACE_S:
            return []
        self.explained = explained
        released, self._held = self._held, []
        return released

    def collect(self, timeout_s: float) -> list[RankFailure]:
        """Records the ends of ranks; returns the failures among them at once."""
        failures = [self._record_end(rank, answer) for rank, answer in self._answers(timeout_s)]
        return [failure for failure in failures if failure is not None]

    def _answers(self, timeout_s: float) -> list[tuple[Rank, RankEnd | RayError | None]]:
        """Returns the answers of processes that were asked for the end of their rank."""
        waiting = {rank.pending: rank for rank in self.ranks if not rank.ended and rank.pending is not None}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s) if waiting else ([], [])
        if ready:  # others may have ended as well
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        return [(waiting[reference], answer_to(reference)) for reference in ready]

    def died(self, rank: Rank, error: RayError) -> RankFailure:
        """Returns the failure of a worker whose call failed, with the evidence there is."""
        text = str(error)
        rank.state = "dead"
        if not isinstance(error, RayActorError):
            last_line = text.strip().splitlines()[-1] if text.strip() else repr(error)
            return rank.failure(FailureKind.RAISED, last_line, text)
        self.workers.seated.pop(rank.bundle, None)
        if error.preempted:
            return rank.failure(FailureKind.PREEMPTED, f"its node {rank.node} was preempted", text)
        if not self.examine:
            return rank.failure(FailureKind.KILLED, f"its process (pid {rank.pid}) ended", text)
        death = cause_of_worker_death(rank, text, self.workers)
        return rank.failure(death.kind, death.cause, death.details or text)

    def _record_end(self, rank: Rank, end: RankEnd | RayError | None) -> RankFailure | None:
        if isinstance(end, ActorUnavailableError):
            if (failure := self._lost_with_raylet(rank)) is not None:
                return failure
            end = None  # the connection broke; asking again shows whether the process lives
        if isinstance(end, RayError):
            return self.died(rank, end)
        if end is None:
            self.await_end(rank)
            return None
        if end.unwritten is not None:
            self.on_unwritten(end.unwritten)
        rank.reusable = end.reusable
        if isinstance(end.result, RankResult):
            rank.result, rank.state = end.result, "done"
            return None
        rank.state = "dead"
        return dataclasses.replace(end.result, step=end.result.step or rank.step)

    def _lost_with_raylet(self, rank: Rank) -> RankFailure | None:
        """Returns the failure of a rank whose node's raylet has ended; Ray reports that later."""
        probed_at = self._probed.get(rank.node_id)
        if probed_at is not None and time.monotonic() - probed_at < _PROBE_NODE_S:
            return None
        death = raylet_death(rank)
        if death is None:
            self._probed[rank.node_id] = time.monotonic()  # probing a silent host is slow: once for all its ranks
            return None
        rank.state = "dead"
        self.workers.seated.pop(rank.bundle, None)
        return rank.failure(death.kind, death.cause)


def answer_to(reference: Any) -> Any:
    """Returns the answer to a call, or the error that Ray raises in its place."""
    try:
        return ray.get(reference)
    except RayError as error:
        return error


def outcome_timeout_s(ranks: int) -> float:
    """Returns how long a rank may leave the call for its end unanswered before it is called again.
    An answer costs the controller a turn: a look at every rank. Ray reports deaths unasked."""
    return max(_OUTCOME_S, _OUTCOME_S_PER_RANK * (ranks - _FEW_RANKS))
