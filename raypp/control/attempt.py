"""One attempt: every bundle staffed, every process seated, their ends awaited. Driven by polling."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypp.control.machine import AttemptGone, Finished, NoResources, RankFailed, Seated
from raypp.control.placement import Placement, all_nodes
from raypp.control.postmortem import inquest, raylet_ended, unseen_death
from raypp.control.protocol import Batch, Ending, Presence, Standing
from raypp.control.seats import Rank, plan_facts, seats_for
from raypp.control.worker_group import Crew, Member
from raypp.failure_kinds import FailureKind
from raypp.mesh.geometry import Mesh
from raypp.mesh.seating import seat_order
from raypp.records import Event, RankFailure, RankResult
from raypp.spec.job import Job

_START_TIMEOUT_S = 180.0
_KNOWN_TIMEOUT_S = 10.0
_WITNESS_GRACE_S = 1.0
_ASK_NODE_S = 2.0
_LEAVE_S = 5.0
_IMPORT_S = 40.0
"""A rank that has not begun yet cannot leave before it has imported all it needs; a new process would, too."""
_END_TIMEOUT_S = 15.0
"""From when a process was ended to when nobody waits for it any more."""

_OUTCOME_S = 30.0
_OUTCOME_S_PER_RANK = 3.0
_FEW_RANKS = 64

AttemptEvent = Seated | RankFailed | NoResources | Finished | AttemptGone


class AttemptPhase(StrEnum):
    """How far the carrying out of one attempt is. What the run does next is `machine.Phase`."""

    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


@dataclass
class Attempt:
    """One life of the ranks, in processes that may have lived through earlier ones.

    Args:
        number: As claimed in the store.
        job: With the mesh of this attempt.
        heard: Called with what an ended rank could not hand over itself.
    """

    job: Job
    number: int
    crew: Crew
    placement: Placement
    heard: Callable[[Batch], None]
    phase: AttemptPhase = AttemptPhase.PLACING
    ranks: list[Rank] = field(default_factory=list)
    _witnessed_at: float | None = None
    _held: list[RankFailed] = field(default_factory=list)
    _killed: bool = False
    _suspects: frozenset[int] = frozenset()
    _explained: bool = False
    """Evidence was told that is more than that of a witness."""
    _asked: dict[str, float] = field(default_factory=dict)
    """When each node was last asked whether Ray's process on it lives."""
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.job.mesh)

    def launch(self) -> None:
        """Begins; `poll` does the rest."""
        self.placement.ask()

    def adopt(
        self, found: Sequence[tuple[Any, Standing]], seated: Mapping[int, Event] | None = None, step: int = 0
    ) -> None:
        """Goes on with an attempt that another life of the controller started.

        Args:
            found: Its workers that live. A rank without one has failed.
            seated: What the events tell of who sat where, by rank: all there is to know of those who are gone.
            step: The last that is known to be done.
        """
        by_rank = {one.seat.rank: (actor, one) for actor, one in found if one.seat is not None}
        free = iter(sorted(set(range(self.mesh.world)) - {one.bundle for _, one in found}))
        for number in range(self.mesh.world):
            coordinates = self.mesh.coordinates(number)
            rank = Rank(number, coordinates.label(self.mesh.sizes), coordinates, -1, "", state="running")
            self.ranks.append(rank)
            if number not in by_rank:
                rank.bundle, rank.failed, rank.state, rank.step = next(free), True, "dead", step
                if seated and (told := seated.get(number)) is not None:
                    rank.node, rank.pid = told.node or "", int(told.details["pid"])
                death = unseen_death(rank)
                self._held.append(RankFailed(rank.failure(death.kind, death.cause)))
                continue
            actor, standing = by_rank[number]
            assert standing.seat is not None and standing.bundle is not None
            facts = standing.presence.facts
            rank.bundle, rank.node_id, rank.seat = standing.bundle, facts.node_id, standing.seat
            self.crew.seated[rank.bundle] = Member(actor, facts.node_id, fresh=False)
            self.crew.devices[rank.bundle] = (facts.node_id, standing.seat.device_index)
            rank.sits(standing.presence, standing.seat.device_index)
            rank.actor = actor
            rank.pending = self._outcome(rank)
        self._to(AttemptPhase.RUNNING)

    def poll(self, timeout_s: float) -> list[AttemptEvent]:
        """What happened since the last poll; waits up to `timeout_s` for something to happen."""
        match self.phase:
            case AttemptPhase.PLACING:
                return self._poll_placing(timeout_s)
            case AttemptPhase.STARTING:
                return self._poll_starting(timeout_s)
            case AttemptPhase.RUNNING:
                return self._poll_running(timeout_s)
            case AttemptPhase.ENDING:
                return self._poll_ending(timeout_s)
            case AttemptPhase.GONE:
                return []

    def end(self, keep: bool, suspects: Collection[int] = ()) -> None:
        """Ends the attempt in every process; `AttemptGone` follows from `poll`.

        Args:
            keep: Processes that can are to take part in the next attempt: they are told to leave, and ended only when
                they have not after a while. Otherwise all are ended.
            suspects: Ranks whose processes are ended in any case.
        """
        if self.phase in (AttemptPhase.ENDING, AttemptPhase.GONE):
            return
        begun = self.phase is AttemptPhase.RUNNING
        self._killed, self._suspects = not keep, frozenset(suspects)
        self._explained |= not begun or bool(suspects)
        for rank in self.ranks:
            if rank.rank in suspects:
                self.crew.kill_frozen(rank.bundle, rank.pid)
            elif not keep or (begun and rank.ended and not rank.usable):
                self.crew.kill(rank.bundle)
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
        self._staff(nodes)
        self._to(AttemptPhase.STARTING)
        return []

    def _staff(self, nodes: list[str]) -> None:
        facts = plan_facts(nodes, all_nodes())
        for bundle, number in enumerate(seat_order(self.mesh, facts)):
            coordinates = self.mesh.coordinates(number)
            label = coordinates.label(self.mesh.sizes)
            self.ranks.append(Rank(number, label, coordinates, bundle, nodes[bundle], facts[bundle].ip))
        self.crew.staff(nodes, [rank.label for rank in self.ranks], self.number, self.placement)
        for rank in self.ranks:
            self._ask_where(rank)
        self.ranks.sort(key=lambda rank: rank.rank)

    # Starting -------------------------------------------------------------------------------------

    def _poll_starting(self, timeout_s: float) -> list[AttemptEvent]:
        waiting = {rank.pending: rank for rank in self.ranks if rank.presence is None}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s)
        for reference in ready:
            failure = self._take_presence(waiting[reference], reference)
            if failure is not None:
                return [RankFailed(failure)]
        waited = time.monotonic() - self._since
        for rank in self.ranks:
            if rank.presence is None and waited > _KNOWN_TIMEOUT_S and not self.crew.seated[rank.bundle].fresh:
                self._replace(rank)
            if rank.presence is None and waited > _START_TIMEOUT_S:
                self.crew.kill(rank.bundle)
                return [RankFailed(rank.failure(FailureKind.UNKNOWN, f"did not start within {_START_TIMEOUT_S:.0f} s"))]
        if any(rank.presence is None for rank in self.ranks):
            return []
        strayed = [rank for rank in self.ranks if rank.presence and rank.presence.facts.node_id != rank.node_id]
        if strayed:
            self.crew.kill(strayed[0].bundle)
            return [
                RankFailed(strayed[0].failure(FailureKind.UNKNOWN, "was started on another node than its bundle's"))
            ]
        self._seat()
        self._to(AttemptPhase.RUNNING)
        return [Seated()]

    def _take_presence(self, rank: Rank, reference: Any) -> RankFailure | None:
        try:
            presence = cast(Presence, ray.get(reference))
        except RayError as error:
            if not self.crew.seated[rank.bundle].fresh:  # it died unseen since its last seat: no failure of this one
                self._replace(rank)
                return None
            return self._died(rank, error)
        told = presence.facts.device_index
        rank.sits(presence, self.crew.device_index(rank.bundle, rank.node_id, told))
        return None

    def _replace(self, rank: Rank) -> None:
        """Another process for a rank whose kept one does not answer."""
        self.crew.kill(rank.bundle)
        self.crew.fill(rank.bundle, rank.node_id, rank.label, self.number, self.placement)
        self._ask_where(rank)

    def _ask_where(self, rank: Rank) -> None:
        rank.actor = self.crew.seated[rank.bundle].actor
        rank.pending = rank.actor.where.remote()

    def _seat(self) -> None:
        """Gives every process its seat, now that each has said where it is."""
        document = self.job.model_dump(mode="json")
        seats = seats_for(self.crew.request.run, self.number, self.mesh, self.ranks, self.crew.device)
        for rank, seat in zip(self.ranks, seats, strict=True):
            rank.seat, rank.state = seat, "starting"
            rank.pending = rank.actor.begin.remote(document, seat, rank.bundle, self.crew.relays.of(rank.bundle))

    # Running --------------------------------------------------------------------------------------

    def _poll_running(self, timeout_s: float) -> list[AttemptEvent]:
        self._held += [RankFailed(failure) for failure in self._take_endings(timeout_s)]
        results = [rank.result for rank in self.ranks if rank.result is not None]
        if len(results) == len(self.ranks):
            return [Finished(any(result.stopped for result in results))]
        return self._release_failures()

    def _take_endings(self, timeout_s: float) -> list[RankFailure]:
        """Hears of ranks that have ended; returns the failures among them."""
        waiting = {rank.pending: rank for rank in self.ranks if not rank.ended and rank.pending is not None}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s) if waiting else ([], [])
        if ready:  # others may have ended as well
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        failures = [self._take_ending(waiting[reference], reference) for reference in ready]
        return [failure for failure in failures if failure is not None]

    def _take_ending(self, rank: Rank, reference: Any) -> RankFailure | None:
        try:
            ending = cast("Ending | None", ray.get(reference))
        except ActorUnavailableError:
            if (failure := self._lost_with_raylet(rank)) is not None:
                return failure
            ending = None  # the connection to it broke; asking again tells whether it lives
        except RayError as error:
            return self._died(rank, error)
        if ending is None:
            rank.pending = self._outcome(rank)
            return None
        if ending.news is not None:
            self.heard(ending.news)
        rank.usable = ending.usable
        if isinstance(ending.result, RankResult):
            rank.result, rank.state = ending.result, "done"
            return None
        rank.failed, rank.state = True, "dead"
        return dataclasses.replace(ending.result, step=ending.result.step or rank.step)

    def _outcome(self, rank: Rank) -> Any:
        return rank.actor.outcome.remote(self.number, outcome_patience_s(len(self.ranks)))

    def _lost_with_raylet(self, rank: Rank) -> RankFailure | None:
        """A rank that does not answer, when Ray's process on its node has ended; Ray says so seconds later only."""
        asked_at = self._asked.get(rank.node_id)
        if asked_at is not None and time.monotonic() - asked_at < _ASK_NODE_S:
            return None
        death = raylet_ended(rank)
        if death is None:
            self._asked[rank.node_id] = time.monotonic()  # a silent host takes long to ask: once for all its ranks
            return None
        rank.failed, rank.state = True, "dead"
        self.crew.seated.pop(rank.bundle, None)
        return rank.failure(death.kind, death.cause)

    def _release_failures(self) -> list[AttemptEvent]:
        """Failures, but a mere witness's only after a while: whoever really died is often told a little later."""
        if not self._held:
            return []
        now = time.monotonic()
        self._witnessed_at = self._witnessed_at or now
        explained = any(not held.failure.kind.traits.witness for held in self._held)
        if not explained and now - self._witnessed_at < _WITNESS_GRACE_S:
            return []
        self._explained = explained
        released: list[AttemptEvent] = list(self._held)
        self._held = []
        return released

    def _died(self, rank: Rank, error: RayError) -> RankFailure:
        """The evidence Ray has of a worker whose process ended without an answer."""
        text = str(error)
        rank.failed, rank.state = True, "dead"
        if not isinstance(error, RayActorError):
            return rank.failure(
                FailureKind.RAISED, text.strip().splitlines()[-1] if text.strip() else repr(error), text
            )
        self.crew.seated.pop(rank.bundle, None)
        if error.preempted:
            return rank.failure(FailureKind.PREEMPTED, f"its node {rank.node} was taken away", text)
        if self.phase is not AttemptPhase.RUNNING and (self._explained or self._killed):  # nobody asks what ended it
            return rank.failure(FailureKind.KILLED, f"its process (pid {rank.pid}) ended", text)
        death = inquest(rank, text, self.crew)
        return rank.failure(death.kind, death.cause, death.details or text)

    # Ending ---------------------------------------------------------------------------------------

    def _poll_ending(self, timeout_s: float) -> list[AttemptEvent]:
        """Until no process is in this attempt any more; what only witnesses have told of may be explained late, and who
        died beside the first is told, too."""
        unasked = not self._killed
        late = [
            failure
            for failure in self._take_endings(timeout_s)
            if not failure.kind.traits.witness and unasked and failure.rank not in self._suspects
        ]
        if late:
            self._explained = True
            return [RankFailed(failure) for failure in late]
        waiting = [rank for rank in self.ranks if not rank.ended and rank.pending is not None]
        waited = time.monotonic() - self._since
        patience_s = _IMPORT_S if any(rank.state == "starting" for rank in waiting) else _LEAVE_S
        if waiting and waited > patience_s and not self._killed:
            silent = [] if self._explained else [self._silent(rank, patience_s) for rank in waiting]
            self._killed = self._explained = True
            self._since = time.monotonic()
            for rank in waiting:
                self.crew.kill_frozen(rank.bundle, rank.pid)
            if silent:
                return [RankFailed(failure) for failure in silent]
        # A lost node answers nothing; the claim of the next attempt keeps its processes from committing.
        if waiting and not (self._killed and waited >= _END_TIMEOUT_S):
            return []
        for rank in self.ranks:
            rank.state = "done" if rank.result else "dead"
            if rank.ended and not rank.usable:
                self.crew.kill(rank.bundle)
        self._to(AttemptPhase.GONE)
        return [AttemptGone()]

    def _silent(self, rank: Rank, patience_s: float) -> RankFailure:
        """The evidence against a rank that neither ended nor left when its peers had lost one."""
        death = inquest(rank, "", self.crew)
        if death.kind.traits.node_lost or death.kind is FailureKind.PREEMPTED:
            return rank.failure(death.kind, death.cause, death.details)
        return rank.failure(
            FailureKind.UNKNOWN, f"did not answer within {patience_s:.0f} s when it was told to leave; it was ended"
        )


def outcome_patience_s(ranks: int) -> float:
    """How long each of so many ranks may leave the question for its end unanswered before it is asked again.

    An answer costs the controller a turn, and with it a look at every rank; death is known without being asked for.
    """
    return max(_OUTCOME_S, _OUTCOME_S_PER_RANK * (ranks - _FEW_RANKS))
