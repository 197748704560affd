"""One attempt: fills each bundle with a process, gives out seats, awaits the ends. It is polled."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError

from raypp.control.machine import AttemptEnded, Finished, NoResources, RankFailed, Seated
from raypp.control.placement import Placement
from raypp.control.postmortem import cause_of_worker_death, death_during_controller_outage
from raypp.control.protocol import ReportBatch, WorkerInfo, WorkerStatus
from raypp.control.rank_ends import RankEnds, answer_to
from raypp.control.ray_state import all_nodes
from raypp.control.seats import Rank, planned_ranks, seats_for
from raypp.control.worker_group import Member, WorkerGroup
from raypp.errors import RayppError, ResourcesError
from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.planning.decision import Decision
from raypp.planning.geometry import Mesh
from raypp.records import RankFailure
from raypp.state.run_records.status import RankStatus

_START_TIMEOUT_S = 180.0
_REUSED_TIMEOUT_S = 10.0
_LEAVE_S = 10.0
_IMPORT_S = 40.0
"""A rank that has not begun cannot leave before its imports are done; those of a new process would
take as long."""
_KILL_TIMEOUT_S = 15.0
"""How long to wait for a process after it was killed."""

LivingWorker: TypeAlias = tuple[Any, WorkerStatus]
"""A living worker and what it says of itself."""
AttemptEvent = Seated | RankFailed | NoResources | Finished | AttemptEnded


class AttemptPhase(StrEnum):
    """Progress of one attempt. `machine.RunPhase` is what the run does."""

    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass
class Attempt:
    """One attempt of a run. Its processes may have taken part in earlier ones. `job`: with the mesh
    of this attempt. `decide`: returns what is decided for it, given whether all its nodes have a C
    compiler, and the rate of the slowest network; 0 if unknown. `on_unwritten`: called with the
    reports that an ended rank could not send itself."""

    job: Job
    number: int
    workers: WorkerGroup
    placement: Placement
    on_unwritten: Callable[[ReportBatch], None]
    decide: Callable[[bool, float], Decision]
    decision: Decision | None = None
    phase: AttemptPhase = AttemptPhase.PLACING
    ranks: list[Rank] = field(default_factory=list)
    _killed: bool = False
    _suspects: frozenset[int] = frozenset()
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.job.mesh)
        self._ends = RankEnds(self.number, self.ranks, self.workers, self.on_unwritten)

    def launch(self) -> None:
        """Requests the devices; `poll` does the rest."""
        self.placement.request()

    def adopt(self, living: Sequence[LivingWorker], places: Sequence[RankStatus] = (), step: int = 0) -> None:
        """Takes over an attempt that an earlier controller process started. `living`: its living
        workers. A rank without one has failed. `places`: where the ranks were, as far as it is
        known. `step`: the last step known to be done."""
        self._to(AttemptPhase.RUNNING)
        by_rank = {one.seat.rank: (actor, one) for actor, one in living if one.seat is not None}
        known = {one.rank: one for one in places}
        free = iter(sorted(set(range(self.mesh.world)) - {one.bundle for _, one in living}))
        for number in range(self.mesh.world):
            coordinates = self.mesh.coordinates(number)
            rank = Rank(number, coordinates.label(self.mesh.sizes), coordinates, -1, "", state="running")
            self.ranks.append(rank)
            if number in by_rank:
                self._adopt_worker(rank, *by_rank[number])
                continue
            rank.bundle, rank.state, rank.step = next(free), "dead", step
            if (place := known.get(number)) is not None:
                rank.node, rank.pid = place.node, place.pid
            death = death_during_controller_outage(rank)
            self._ends.hold(rank.failure(death.kind, death.cause))
        for rank in self.ranks:
            if not rank.ended:
                self._ends.await_end(rank)

    def _adopt_worker(self, rank: Rank, actor: Any, status: WorkerStatus) -> None:
        assert status.seat is not None and status.bundle is not None
        node_id, device = status.info.facts.node_id, status.seat.device_index
        rank.bundle, rank.node_id, rank.seat = status.bundle, node_id, status.seat
        self.workers.seated[rank.bundle] = Member(actor, node_id, fresh=False)
        self.workers.devices[rank.bundle] = (node_id, device)
        rank.set_info(status.info, device)
        rank.actor = actor

    def poll(self, timeout_s: float) -> list[AttemptEvent]:
        """Returns what happened since the last poll; waits up to `timeout_s` for something."""
        match self.phase:
            case AttemptPhase.PLACING:
                return self._poll_placing(timeout_s)
            case AttemptPhase.STARTING:
                return self._poll_starting(timeout_s)
            case AttemptPhase.RUNNING:
                return self._poll_running(timeout_s)
            case AttemptPhase.ENDING:
                return self._poll_ending(timeout_s)
            case AttemptPhase.ENDED:
                return []

    def end(self, keep: bool, suspects: Collection[int] = ()) -> None:
        """Ends the attempt in every process; `poll` returns `AttemptEnded` when that is done.
        `keep`: asks processes that can take part in the next attempt to leave, and ends only those
        that are late. Else all are ended. `suspects`: ranks that are ended in any case."""
        if self.phase in (AttemptPhase.ENDING, AttemptPhase.ENDED):
            return
        begun = self.phase is AttemptPhase.RUNNING
        self._killed, self._suspects = not keep, frozenset(suspects)
        self._ends.explained |= not begun or bool(suspects)
        for rank in self.ranks:
            if rank.rank in suspects:
                self.workers.kill_frozen(rank.bundle, rank.pid)
            elif not keep or (begun and rank.ended and not rank.reusable):
                self.workers.kill(rank.bundle)
            elif not begun:
                rank.pending = None
            elif not rank.ended:
                rank.actor.leave.remote(self.number)
        self._to(AttemptPhase.ENDING)

    def _to(self, phase: AttemptPhase) -> None:
        self.phase = phase
        self._since = time.monotonic()

    # Placing --------------------------------------------------------------------------------------

    def _poll_placing(self, timeout_s: float) -> list[AttemptEvent]:
        nodes = self.placement.nodes()
        if nodes is None:
            reason = self.placement.hopeless()
            if reason is not None:
                return [NoResources(reason)]
            time.sleep(min(timeout_s, 0.05))
            return []
        try:
            self.ranks += planned_ranks(self.mesh, nodes, all_nodes(), apart=self.job.outer is not None)
        except ResourcesError as error:
            return [NoResources("; ".join(map(str, error.problems)))]
        labels = [rank.label for rank in sorted(self.ranks, key=lambda rank: rank.bundle)]
        self.workers.fill(nodes, labels, self.number, self.placement)
        for rank in self.ranks:
            self._ask_info(rank)
        self._to(AttemptPhase.STARTING)
        return []

    # Starting -------------------------------------------------------------------------------------

    def _poll_starting(self, timeout_s: float) -> list[AttemptEvent]:
        for rank, answer in self._answers(timeout_s):
            failure = self._take_info(rank, answer)
            if failure is not None:
                return [RankFailed(failure)]
        waited = time.monotonic() - self._since
        for rank in self.ranks:
            member = self.workers.seated[rank.bundle]
            if rank.info is None and waited > _REUSED_TIMEOUT_S and not member.fresh:
                self._replace(rank)
            if rank.info is None and waited > _START_TIMEOUT_S:
                return self._failed_start(rank, f"did not start within {_START_TIMEOUT_S:.0f} s")
        if any(rank.info is None for rank in self.ranks):
            return []
        for rank in self.ranks:
            if rank.info is not None and rank.info.facts.node_id != rank.node_id:
                return self._failed_start(rank, "started on another node than its bundle's")
        self._give_seats()
        self._to(AttemptPhase.RUNNING)
        return [Seated()]

    def _answers(self, timeout_s: float) -> list[tuple[Rank, WorkerInfo | RayError]]:
        """Returns the answers of processes that were asked where they run."""
        waiting = {rank.pending: rank for rank in self.ranks if rank.info is None}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s)
        return [(waiting[reference], answer_to(reference)) for reference in ready]

    def _failed_start(self, rank: Rank, cause: str) -> list[AttemptEvent]:
        self.workers.kill(rank.bundle)
        return [RankFailed(rank.failure(FailureKind.UNKNOWN, cause))]

    def _take_info(self, rank: Rank, info: WorkerInfo | RayError) -> RankFailure | None:
        if isinstance(info, RayError):
            cause = getattr(info, "cause", None)  # of an error that the process raised, rather than its end
            if isinstance(cause, RayppError):
                return rank.failure(cause.failure_kind or FailureKind.USER_ERROR, str(cause))
            if not self.workers.seated[rank.bundle].fresh:  # it died after its last seat: not a failure of this attempt
                self._replace(rank)
                return None
            return self._ends.died(rank, info)
        rank.set_info(info, self.workers.device_index(rank.bundle, rank.node_id, info.facts.device_index))
        return None

    def _replace(self, rank: Rank) -> None:
        """Starts a new process for a rank whose reused one does not answer."""
        self.workers.kill(rank.bundle)
        self.workers.fill_bundle(rank.bundle, rank.node_id, rank.label, self.number, self.placement)
        self._ask_info(rank)

    def _ask_info(self, rank: Rank) -> None:
        rank.actor = self.workers.seated[rank.bundle].actor
        rank.pending = rank.actor.info.remote()

    def _give_seats(self) -> None:
        """Decides for the nodes, and gives every process its seat, once all said where they run."""
        facts = [rank.info.facts for rank in self.ranks if rank.info is not None]
        rates = [one.network_gbps for one in facts if one.network_gbps]
        self.decision = self.decide(all(one.compiler for one in facts), min(rates, default=0.0))
        document = self.decision.document()
        seats = seats_for(self.workers.request.run, self.number, self.mesh, self.ranks, self.workers.device)
        for rank, seat in zip(self.ranks, seats, strict=True):
            rank.seat, rank.state = seat, "starting"
            rank.pending = rank.actor.begin.remote(document, seat, rank.bundle)

    # Running and ending ---------------------------------------------------------------------------

    def _poll_running(self, timeout_s: float) -> list[AttemptEvent]:
        failures = self._ends.failures(timeout_s)
        results = [rank.result for rank in self.ranks if rank.result is not None]
        if len(results) == len(self.ranks):
            return [Finished(any(result.stopped for result in results), max(result.step for result in results))]
        return [RankFailed(failure) for failure in failures]

    def _poll_ending(self, timeout_s: float) -> list[AttemptEvent]:
        """Waits until no process is in this attempt any more. Reports failures found late: the
        cause where only lost peers are known, and ranks that died with the first."""
        self._ends.examine = not (self._killed or self._ends.explained)
        late = [
            failure
            for failure in self._ends.collect(timeout_s)
            if not failure.kind.traits.witness and not self._killed and failure.rank not in self._suspects
        ]
        if late:
            self._ends.explained = True
            return [RankFailed(failure) for failure in late]
        waiting = [rank for rank in self.ranks if not rank.ended and rank.pending is not None]
        waited = time.monotonic() - self._since
        leave_s = _IMPORT_S if any(rank.state == "starting" for rank in waiting) else _LEAVE_S
        if waiting and waited > leave_s and not self._killed:
            return self._kill_silent(waiting, leave_s)
        # A lost node answers nothing; the next attempt's claim keeps its processes from committing.
        if waiting and not (self._killed and waited >= _KILL_TIMEOUT_S):
            return []
        for rank in self.ranks:
            if not rank.ended:
                rank.state = "dead"
            elif not rank.reusable:
                self.workers.kill(rank.bundle)
        self._to(AttemptPhase.ENDED)
        return [AttemptEnded()]

    def _kill_silent(self, waiting: Sequence[Rank], leave_s: float) -> list[AttemptEvent]:
        """Kills the ranks that did not leave; they failed, too, where no other cause is known."""
        silent = [] if self._ends.explained else [self._silent_failure(rank, leave_s) for rank in waiting]
        self._killed = self._ends.explained = True
        self._since = time.monotonic()
        for rank in waiting:
            self.workers.kill_frozen(rank.bundle, rank.pid)
        return [RankFailed(failure) for failure in silent]

    def _silent_failure(self, rank: Rank, leave_s: float) -> RankFailure:
        death = cause_of_worker_death(rank, "", self.workers)
        if death.kind.traits.node_lost or not death.kind.traits.counts:
            return rank.failure(death.kind, death.cause, death.details)
        cause = f"did not answer within {leave_s:.0f} s when asked to leave the attempt; its process was ended"
        return rank.failure(FailureKind.UNKNOWN, cause)
