"""One attempt: a placement group, one worker actor per rank, their seats, their ends. Driven by polling."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.control.machine import AttemptGone, Finished, NoResources, RankFailed, Seated
from raypp.control.messages import NAMESPACE, Presence, RunRequest
from raypp.control.worker import Worker
from raypp.mesh.geometry import Mesh
from raypp.mesh.seating import seat_order
from raypp.records import Coordinates, NodeFacts, RankFailure, RankResult, Seat
from raypp.spec.job import Job

_PLACEMENT_TIMEOUT_S = 300.0
_INFEASIBLE_GRACE_S = 15.0
_START_TIMEOUT_S = 180.0
_WITNESS_GRACE_S = 2.0
_END_TIMEOUT_S = 20.0

# Every device stays visible and each rank sets its own: one visible device per process cripples NCCL. Ray takes
# this variable out of a job's own settings, so it is given to the actors.
_ACTOR_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

AttemptEvent = Seated | RankFailed | NoResources | Finished | AttemptGone


class Stage(StrEnum):
    """How far the attempt is."""

    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


@dataclass
class Rank:
    """One rank of the attempt and its actor.

    Attributes:
        pending: The answer awaited from the actor: `where` while starting, `run` afterwards.
        result: How it ended, once it has.
    """

    rank: int
    label: str
    coordinates: Coordinates
    actor: Any
    bundle: int
    node_id: str
    node: str = ""
    pid: int = 0
    state: str = "starting"
    step: int = 0
    presence: Presence | None = None
    pending: Any = None
    result: RankResult | None = None
    failed: bool = False


@dataclass
class Placement:
    """The run's placement group, kept from one attempt to the next: Ray moves the bundles of a lost node itself."""

    name: str
    world: int
    bundle: dict[str, float]
    group: PlacementGroup | None = None
    asked_at: float = 0.0
    infeasible_since: float | None = None

    def ask(self) -> None:
        """Makes the group unless it is there; the wait for it starts again."""
        self.asked_at = time.monotonic()
        self.infeasible_since = None
        if self.group is not None:
            return
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(self.name))  # an earlier life's
        self.group = placement_group([dict(self.bundle)] * self.world, strategy="PACK", name=self.name)

    def nodes(self) -> list[str] | None:
        """The node of each bundle; None while not all are placed."""
        table = self._table()
        if table.get("state") != "CREATED":
            return None
        where = {int(index): str(node) for index, node in table["bundles_to_node_id"].items()}
        alive = {node["NodeID"] for node in all_nodes() if node["Alive"]}
        return [where[index] for index in range(self.world)] if set(where.values()) <= alive else None

    def hopeless(self) -> str | None:
        """Why waiting on makes no sense, or None."""
        now = time.monotonic()
        state = (self._table().get("stats") or {}).get("scheduling_state")
        if state != "INFEASIBLE":
            self.infeasible_since = None
        elif self.infeasible_since is None:
            self.infeasible_since = now
        want = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        if self.infeasible_since is not None and now - self.infeasible_since > _INFEASIBLE_GRACE_S:
            return f"the cluster cannot hold {self.world} ranks of {want}: it has {capacity()}"
        if now - self.asked_at > _PLACEMENT_TIMEOUT_S:
            waited = f"did not become free within {_PLACEMENT_TIMEOUT_S:.0f} s"
            return f"{self.world} ranks of {want} {waited}; the cluster has {capacity()}"
        return None

    def remove(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def _table(self) -> dict[str, Any]:
        return dict(placement_group_table(self.group)) if self.group is not None else {}


def all_nodes() -> list[dict[str, Any]]:
    """Every node Ray has known, dead ones too (`Alive`)."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def capacity() -> str:
    """What the living nodes have, for people."""
    parts = [
        f"{node['NodeManagerAddress']} ({has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU)"
        for node in all_nodes()
        if node["Alive"] and (has := node["Resources"]) is not None
    ]
    return ", ".join(parts) or "no living node"


@dataclass
class Attempt:
    """One life of the worker group.

    Args:
        number: As claimed in the store.
        life: The controller's life.
        device: cpu or cuda.
        controller: Handle the workers report to.
    """

    request: RunRequest
    job: Job
    number: int
    life: str
    device: str
    placement: Placement
    controller: Any
    stage: Stage = Stage.PLACING
    ranks: list[Rank] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    _witnessed_at: float | None = None
    _held: list[RankFailed] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.job.mesh)
        self.placement.ask()

    def poll(self, timeout_s: float) -> list[AttemptEvent]:
        """What happened since the last poll; waits up to `timeout_s` for something to happen."""
        match self.stage:
            case Stage.PLACING:
                return self._poll_placing(timeout_s)
            case Stage.STARTING:
                return self._poll_starting(timeout_s)
            case Stage.RUNNING:
                return self._poll_running(timeout_s)
            case Stage.ENDING:
                return self._poll_ending(timeout_s)
            case Stage.GONE:
                return []

    def end(self) -> None:
        """Kills every process of the attempt; `AttemptGone` follows from `poll`."""
        if self.stage in (Stage.ENDING, Stage.GONE):
            return
        for rank in self.ranks:
            ray.kill(rank.actor, no_restart=True)
        self._to(Stage.ENDING)

    def _to(self, stage: Stage) -> None:
        self.stage = stage
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
        self._start_workers(nodes)
        self._to(Stage.STARTING)
        return []

    def _start_workers(self, nodes: list[str]) -> None:
        """One actor per bundle, named after the seat planned for it: Ray's names cannot change later."""
        addresses = {node["NodeID"]: node for node in all_nodes()}
        facts = [
            NodeFacts(node, addresses[node]["NodeManagerAddress"], addresses[node]["NodeManagerHostname"], 0, "")
            for node in nodes
        ]
        order = seat_order(self.mesh, facts)
        # Ray would leave one thread to every actor, whatever CPUs it reserves for it.
        threads = {"OMP_NUM_THREADS": str(max(1, int(self.job.resources.cpus_per_rank)))}
        environment = threads | self.job.resources.env
        suffix = f" (attempt {self.number})" if self.number > 1 else ""
        for bundle, number in enumerate(order):
            coordinates = self.mesh.coordinates(number)
            label = coordinates.label(self.mesh.sizes)
            group = cast(PlacementGroup, self.placement.group)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor: Any = (
                ray.remote(Worker)
                .options(
                    name=f"raypp/{self.request.run}/{label}{suffix}",
                    namespace=NAMESPACE,
                    num_cpus=self.job.resources.cpus_per_rank,
                    num_gpus=1 if self.device == "cuda" else 0,
                    max_concurrency=4,
                    max_restarts=0,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": _ACTOR_ENVIRONMENT},
                )
                .remote(self.request.run, label, environment, self.request.rank_function)
            )
            rank = Rank(number, label, coordinates, actor, bundle, nodes[bundle], facts[bundle].ip)
            rank.pending = actor.where.remote()
            self.ranks.append(rank)
        self.ranks.sort(key=lambda rank: rank.rank)

    # Starting -------------------------------------------------------------------------------------

    def _poll_starting(self, timeout_s: float) -> list[AttemptEvent]:
        waiting = {rank.pending: rank for rank in self.ranks if rank.presence is None}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s)
        for reference in ready:
            rank = waiting[reference]
            try:
                rank.presence = cast(Presence, ray.get(reference))
            except RayError as error:
                return [RankFailed(self._died(rank, error))]
            rank.pid = rank.presence.facts.pid
        if len(ready) < len(waiting):
            if time.monotonic() - self._since > _START_TIMEOUT_S:
                rank = next(rank for rank in self.ranks if rank.presence is None)
                return [RankFailed(self._failure(rank, "unknown", f"did not start within {_START_TIMEOUT_S:.0f} s"))]
            return []
        strayed = [rank for rank in self.ranks if rank.presence and rank.presence.facts.node_id != rank.node_id]
        if strayed:
            return [RankFailed(self._failure(strayed[0], "unknown", "was started on another node than its bundle's"))]
        self._seat()
        self._to(Stage.RUNNING)
        return [Seated()]

    def _seat(self) -> None:
        """Gives every worker its seat, now that each has said where it is."""
        self.seats = seats_for(self.request.run, self.number, self.mesh, self.ranks, self.device)
        document = self.job.model_dump(mode="json")
        for rank, seat in zip(self.ranks, self.seats, strict=True):
            rank.state = "running"
            rank.pending = rank.actor.run.remote(document, seat, self.life, self.controller)

    # Running --------------------------------------------------------------------------------------

    def _poll_running(self, timeout_s: float) -> list[AttemptEvent]:
        waiting = {rank.pending: rank for rank in self.ranks if rank.result is None and not rank.failed}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s) if waiting else ([], [])
        for reference in ready:
            failure = self._take_result(waiting[reference], reference)
            if failure is not None:
                self._held.append(RankFailed(failure))
        results = [rank.result for rank in self.ranks if rank.result is not None]
        if len(results) == len(self.ranks):
            return [Finished(any(result.stopped for result in results))]
        return self._release_failures()

    def _take_result(self, rank: Rank, reference: Any) -> RankFailure | None:
        try:
            outcome = ray.get(reference)
        except RayError as error:
            outcome = self._died(rank, error)
        if isinstance(outcome, RankResult):
            rank.result, rank.state = outcome, "done"
            return None
        rank.failed, rank.state = True, "dead"
        return cast(RankFailure, dataclasses.replace(outcome, step=outcome.step or rank.step))

    def _release_failures(self) -> list[AttemptEvent]:
        """Failures, but a mere witness's only after a while: whoever really died is often told a little later."""
        if not self._held:
            return []
        now = time.monotonic()
        self._witnessed_at = self._witnessed_at or now
        if all(held.failure.kind == "lost_peer" for held in self._held) and now - self._witnessed_at < _WITNESS_GRACE_S:
            return []
        released: list[AttemptEvent] = list(self._held)
        self._held = []
        return released

    def _died(self, rank: Rank, error: RayError) -> RankFailure:
        """The evidence Ray has of a worker whose process ended without an answer."""
        text = str(error)
        rank.failed, rank.state = True, "dead"
        if isinstance(error, GetTimeoutError) or not isinstance(error, RayActorError):
            return self._failure(rank, "raised", text.strip().splitlines()[-1] if text.strip() else repr(error), text)
        node = next((node for node in all_nodes() if node["NodeID"] == rank.node_id), None)
        if node is None or not node["Alive"]:
            return self._failure(rank, "node_lost", f"its node {rank.node} is lost", text)
        return self._failure(
            rank, "killed", f"its process (pid {rank.pid}) ended: killed by a signal, or out of memory", text
        )

    def _failure(self, rank: Rank, kind: str, cause: str, details: str = "") -> RankFailure:
        return RankFailure(rank.rank, rank.label, rank.node, rank.pid, kind, cause, rank.step, details[-4000:])

    # Ending ---------------------------------------------------------------------------------------

    def _poll_ending(self, timeout_s: float) -> list[AttemptEvent]:
        waiting = [rank.pending for rank in self.ranks if rank.result is None and rank.pending is not None]
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s) if waiting else ([], [])
        # A lost node answers nothing; the claim of the next attempt keeps its processes from committing.
        if len(ready) < len(waiting) and time.monotonic() - self._since < _END_TIMEOUT_S:
            return []
        for rank in self.ranks:
            rank.state = "done" if rank.result else "dead"
        self._to(Stage.GONE)
        return [AttemptGone()]


def seats_for(run: str, attempt: int, mesh: Mesh, ranks: list[Rank], device: str) -> list[Seat]:
    """The seats, in rank order; rank 0's node is where the ranks meet."""
    present = [rank.presence for rank in ranks if rank.presence is not None]
    nodes = list(dict.fromkeys(presence.facts.node_id for presence in present))
    locals_: dict[str, int] = {}
    seats = []
    for rank, presence in zip(ranks, present, strict=True):
        facts = presence.facts
        local = locals_.get(facts.node_id, 0)
        locals_[facts.node_id] = local + 1
        seats.append(
            Seat(
                run=run,
                attempt=attempt,
                rank=rank.rank,
                world_size=mesh.world,
                coordinates=rank.coordinates,
                mesh_sizes=mesh.sizes,
                local_rank=local,
                node_rank=nodes.index(facts.node_id),
                node=facts.ip,
                master_addr=present[0].facts.ip,
                master_port=present[0].free_port,
                interface=facts.interface,
                device=device,
                device_index=facts.device_index if device == "cuda" else 0,
            )
        )
    return [
        dataclasses.replace(seat, local_world_size=locals_[presence.facts.node_id])
        for seat, presence in zip(seats, present, strict=True)
    ]
