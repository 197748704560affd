"""Chooses the mesh of a run by the nodes that are available, and the nodes to exclude."""

from collections.abc import Callable

from raypp.control import machine as m
from raypp.control.attempt import Attempt, AttemptPhase
from raypp.control.placement import Placement
from raypp.control.ray_state import all_nodes
from raypp.control.recovery.policy import bad_nodes
from raypp.control.reshape import best_for, reshape_event, reshaped, shape_of
from raypp.control.seats import SITE
from raypp.control.watchers import Turn
from raypp.control.worker_group import WorkerGroup
from raypp.errors import size_text
from raypp.job.job import Job
from raypp.planning.geometry import Shape
from raypp.records import Event

_CHECK_EVERY_S = 1.0
_STEADY_S = 3.0


class ElasticSizing:
    """The mesh a run should have now. It differs from the job's only with `recovery.elastic`.
    `job`: as the user wrote it. `record_event`: takes events. `others_wait`: returns whether runs
    that come before wait in the cluster's line: until then, the run does not grow."""

    def __init__(
        self, job: Job, record_event: Callable[[Event], None], others_wait: Callable[[], bool] = lambda: False
    ) -> None:
        self._job = job
        self._others_wait = others_wait
        self._record_event = record_event
        self.options = job.recovery.elastic_options
        self.wanted = shape_of(job)
        self.gpu_bytes = 0
        """Memory of the cluster's smallest GPU; 0 if unknown, and on CPUs. Set before any mesh is
        chosen."""
        self._best: dict[int, Shape | None] = {}
        self._last: Shape | None = None
        self.why = ""
        """Why the mesh changes, for the event."""
        self._checked_at = 0.0
        self._room_since: float | None = None
        self._reported_bad: set[str] = set()
        self._reported_memory = False

    def largest(self) -> Shape:
        """Returns the mesh to start with: the largest one allowed."""
        return self.best(self.wanted.world) or self.wanted

    def best(self, room: int) -> Shape | None:
        """Returns the best mesh for at most `room` ranks; None when there is none."""
        if room not in self._best:
            self._best[room] = best_for(self._job, room, self.gpu_bytes)
        return self._best[room]

    def shape(self, machine: m.Machine) -> Shape:
        """Returns the mesh of the current or next attempt."""
        return machine.shape or self.wanted

    def job(self, machine: m.Machine) -> Job:
        """Returns the job on the mesh of the current attempt."""
        return reshaped(self._job, self.shape(machine))

    def resume(self, shape: Shape | None) -> None:
        """Sets the mesh of an earlier controller's last attempt, which is recorded already."""
        self._last = shape

    def smaller(self, machine: m.Machine) -> list[int]:
        """Returns with how many ranks the run can go on for one of higher priority; most first."""
        sizes, room = list[int](), self.shape(machine).world - 1
        while self._job.recovery.elastic and (shape := self.best(room)) is not None:
            sizes, room = [*sizes, shape.world], shape.world - 1
        return sizes + [0] * self._job.recovery.preemptible

    def prepare(self, machine: m.Machine, placement: Placement, workers: WorkerGroup) -> None:
        """Adapts placement and processes to the next attempt's mesh and to excluded nodes."""
        shape = self.shape(machine)
        excluded = self._excluded(machine, placement, shape.world)
        last = self._last or self.wanted
        if shape != last:
            self._record_event(reshape_event(last, shape, self.why, machine.attempt))
        if shape != last or placement.world != shape.world or excluded != placement.excluded:
            workers.empty_bundles()
            placement.remove()
        placement.world, placement.excluded = shape.world, excluded
        self._last, self._room_since = shape, None

    def check(self, turn: Turn) -> m.Reshape | None:
        """Returns whether another mesh is due."""
        machine, now = turn.machine, turn.now
        if self.options is None or machine.reshaping or now - self._checked_at < _CHECK_EVERY_S:
            return None
        self._checked_at = now
        if machine.phase is m.RunPhase.LAUNCHING:
            return self._smaller(machine, turn.attempt, turn.placement)
        # A larger mesh begins with a save, for which the ranks would wait.
        if machine.phase is m.RunPhase.RUNNING and not turn.record.unsaved(machine.committed_step):
            return self._larger(machine, turn.placement, now)
        return None

    def is_full_size(self, machine: m.Machine) -> bool:
        """Returns whether the run has every rank it can have. Only then are spares held."""
        return self.shape(machine).world >= self.largest().world

    def _smaller(self, machine: m.Machine, attempt: Attempt, placement: Placement) -> m.Reshape | None:
        assert self.options is not None
        waited = placement.waited_s()
        if attempt.phase is not AttemptPhase.PLACING or waited < max(self.options.grace_s, 2.0):
            return None
        current, room = self.shape(machine), placement.room(self._excluded(machine, placement))
        best = self.best(room)
        if best is None and not self._reported_memory and best_for(self._job, room) is not None:
            self._reported_memory = True
            message = f"waits for {current.world} ranks, with room for {room}: on fewer, ranks are planned to need "
            message += f"more memory than a GPU has ({size_text(self.gpu_bytes)})"
            self._record_event(Event("no_smaller_mesh", message, attempt=machine.attempt))
        if best is None or best.world >= current.world:
            return None
        self.why = f"there was room for only {room} of {current.world} ranks for {waited:.0f} s"
        return m.Reshape(best, current.world)

    def _larger(self, machine: m.Machine, placement: Placement, now: float) -> m.Reshape | None:
        current = self.shape(machine)
        best = None
        if not self.is_full_size(machine):
            best = self.best(placement.room(self._excluded(machine, placement)))
        if best is None or best.world <= current.world:
            self._room_since = None
            return None
        self._room_since = self._room_since or now
        if now - self._room_since >= _STEADY_S and self._others_wait():
            self._room_since = now  # asked again after a while: it reads the whole line
        if now - self._room_since < _STEADY_S:
            return None
        self.why = f"there is room for {best.world} ranks again"
        return m.Reshape(best, current.world)

    def _excluded(self, machine: m.Machine, placement: Placement, world: int = 0) -> frozenset[str]:
        """Returns the nodes to leave out, by id, when the run can do without them: those that were
        lost repeatedly, or failed a test. With `recovery.site_timeout_s`, those of sites without
        room for a replica, when the others have room for `world` ranks."""
        if self._job.recovery.site_timeout_s is not None:
            return self._partial_sites(placement, world)
        bad = {node: f"was lost in {count} attempts" for node, count in bad_nodes(machine.history).items()}
        bad |= {node: f"failed its test ({error})" for node, error in machine.unfit}
        excluded = {node["NodeID"]: node["NodeManagerAddress"] for node in all_nodes() if node["Alive"]} if bad else {}
        excluded = {node: address for node, address in excluded.items() if address in bad}
        if not excluded or self.best(placement.room(frozenset(excluded))) is None:
            return frozenset()
        for address in sorted(set(excluded.values()) - self._reported_bad):
            self._reported_bad.add(address)
            message = f"{address} {bad[address]} and is excluded from now on"
            self._record_event(Event("node_left_out", message, attempt=machine.attempt, node=address))
        return frozenset(excluded)

    def _partial_sites(self, placement: Placement, world: int) -> frozenset[str]:
        site_of = {node["NodeID"]: node.get("Labels", {}).get(SITE, "") for node in all_nodes() if node["Alive"]}
        replica = self.wanted.world // self.wanted.dp_replicate
        partial: set[str] = set()
        for site in set(site_of.values()):
            elsewhere = {node for node, other in site_of.items() if other != site}
            if 0 < placement.room(frozenset(elsewhere)) < replica:
                partial |= site_of.keys() - elsewhere
        room = placement.room(frozenset(partial))
        return frozenset(partial) if room >= world and self.best(room) is not None else frozenset()
