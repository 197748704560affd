"""Fits a run to the nodes there are: how many ranks it has, and which nodes it does without."""

from __future__ import annotations

import time
from collections.abc import Callable

from raypp.control import machine as m
from raypp.control.attempt import Attempt, AttemptPhase
from raypp.control.placement import Placement
from raypp.control.ray_nodes import all_nodes
from raypp.control.reshape import best_for, reshape_event, reshaped, shape_of
from raypp.control.worker_group import Crew
from raypp.records import Coordinates, Event
from raypp.recovery.elastic import Shape
from raypp.recovery.policy import bad_nodes
from raypp.spec.job import Job

_LOOK_EVERY_S = 1.0
_STEADY_S = 3.0


class Fitting:
    """Which mesh a run should have now. Only with `recovery.elastic` is that ever another than the job's.

    Args:
        job: As the user wrote it.
        tell: Takes events.
    """

    def __init__(self, job: Job, tell: Callable[[Event], None]) -> None:
        self._job = job
        self._tell = tell
        self.options = job.recovery.elastic_options
        self.wanted = shape_of(job)
        self._known: dict[int, Shape | None] = {}
        self._last: Shape | None = None
        self._why = ""
        self._looked_at = 0.0
        self._room_since: float | None = None
        self._told_bad: set[str] = set()

    def first(self) -> Shape:
        """The mesh to begin with."""
        return self.best(self.wanted.world) or self.wanted

    def best(self, room: int) -> Shape | None:
        """The best mesh for so many ranks; None when there is none."""
        if room not in self._known:
            self._known[room] = best_for(self._job, room)
        return self._known[room]

    def shape(self, machine: m.Machine) -> Shape:
        return machine.shape or self.wanted

    def job(self, machine: m.Machine) -> Job:
        """The job as the present attempt runs it."""
        return reshaped(self._job, self.shape(machine))

    def of_seat(self, sizes: Coordinates) -> Shape:
        """The mesh that a rank found at work is part of."""
        replicas = sizes.dp_replicate * sizes.fsdp
        each = self.wanted.microbatches_per_step // replicas
        return Shape(sizes.pp, sizes.dp_replicate, sizes.fsdp, sizes.cp, self.wanted.ep, each)

    def go_on_with(self, shape: Shape) -> None:
        """A later life of the controller: the last attempt had this mesh, which is told already."""
        self._last = shape

    def prepare(self, machine: m.Machine, placement: Placement, crew: Crew) -> bool:
        """Before an attempt: devices for its mesh, on nodes that are not left out. Another mesh has other processes.

        Returns:
            Whether the mesh is another one than before.
        """
        shape = self.shape(machine)
        left_out = self._left_out(machine, placement)
        last = self._last or self.wanted
        if shape != last:
            self._tell(reshape_event(last, shape, self._why, machine.attempt))
        if shape != last or placement.world != shape.world or not left_out <= placement.left_out:
            crew.leave_bundles()
            placement.remove()
        placement.world, placement.left_out = shape.world, placement.left_out | left_out
        self._last, self._room_since = shape, None
        return shape != last

    def look(self, machine: m.Machine, attempt: Attempt, placement: Placement) -> m.Reshape | None:
        """Whether another mesh is due: asked in every turn."""
        now = time.monotonic()
        if self.options is None or machine.reshaping or now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        if machine.phase is m.Phase.LAUNCHING:
            return self._smaller(machine, attempt, placement)
        if machine.phase is m.Phase.RUNNING:
            return self._larger(machine, placement, now)
        return None

    def is_whole(self, machine: m.Machine) -> bool:
        """Whether it has every rank it could have; only then are there devices to spare."""
        return self.shape(machine).world >= self.first().world

    def _smaller(self, machine: m.Machine, attempt: Attempt, placement: Placement) -> m.Reshape | None:
        assert self.options is not None
        waited = placement.waited_s()
        if attempt.phase is not AttemptPhase.PLACING or waited < max(self.options.grace_s, 2.0):
            return None
        present, room = self.shape(machine), placement.room()
        best = self.best(room)
        if best is None or best.world >= present.world:
            return None
        self._why = f"for {waited:.0f} s there was room for {room} of {present.world} ranks"
        return m.Reshape(best, present.world)

    def _larger(self, machine: m.Machine, placement: Placement, now: float) -> m.Reshape | None:
        present = self.shape(machine)
        best = None
        if not self.is_whole(machine):
            best = self.best(placement.room(self._left_out(machine, placement)))
        if best is None or best.world <= present.world:
            self._room_since = None
            return None
        self._room_since = self._room_since or now
        if now - self._room_since < _STEADY_S:
            return None
        self._why = f"there is room for {best.world} ranks again"
        return m.Reshape(best, present.world)

    def _left_out(self, machine: m.Machine, placement: Placement) -> frozenset[str]:
        """Nodes that were lost again and again, by id, when the run can do without them."""
        bad = bad_nodes(machine.history)
        found = {node["NodeID"]: node["NodeManagerAddress"] for node in all_nodes() if node["Alive"]} if bad else {}
        found = {node: address for node, address in found.items() if address in bad}
        if not found or self.best(placement.room(frozenset(found))) is None:
            return frozenset()
        for address in sorted(set(found.values()) - self._told_bad):
            self._told_bad.add(address)
            words = f"{address} was lost in {bad[address]} attempts and is left out from now on"
            self._tell(Event("node_left_out", words, attempt=machine.attempt, node=address))
        return frozenset(found)
