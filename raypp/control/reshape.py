"""Puts a job on another mesh than its own, and decides what follows from it there."""

from dataclasses import replace

from raypp.job.job import Job
from raypp.planning.check import check_plan
from raypp.planning.decide import decide
from raypp.planning.decision import CERTAIN, Decision, Facts
from raypp.planning.geometry import Shape, best_shape
from raypp.planning.memory import peak_memory
from raypp.records import AXES, Event
from raypp.state.checkpoint.run_spec import write_decision
from raypp.storage import ObjectStore

_USABLE = 0.97
"""Share of a GPU's memory that CUDA reports at least; the cluster's count is 1 to 2 % above it."""


def best_for(job: Job, room: int, gpu_bytes: int = 0) -> Shape | None:
    """Returns the best mesh for at most `room` ranks, of those the job allows; None if none. `job`:
    as the user wrote it. `gpu_bytes`: memory of the smallest GPU that a rank may get; 0 if unknown,
    and on CPUs. Meshes planned to need more are left out, because their ranks may refuse it, and
    that would end the run. The largest mesh stays: it is checked at submission."""
    wanted, options = shape_of(job), job.recovery.elastic_options
    if options is None:
        return wanted if room >= wanted.world else None
    least, most = options.min_ranks, options.max_ranks

    def valid(shape: Shape) -> bool:
        replica = replace(shape, dp_replicate=wanted.dp_replicate, microbatches=wanted.microbatches)
        if replica != wanted and job.recovery.site_timeout_s is not None:
            return False  # sites have whole replicas
        return not check_plan(reshaped(job, shape))

    too_large: list[Shape] = []

    def fits(shape: Shape) -> bool:
        # A plan may take a second: none is made of a shape that spreads the model over no more
        # ranks than one that was too large. A single replica is apart: nothing of it is gathered.
        if any(
            shape.pp <= one.pp and shape.fsdp <= one.fsdp and (shape.replicas == 1) == (one.replicas == 1)
            for one in too_large
        ):
            return False
        if not valid(shape):
            return False
        if CERTAIN * peak_memory(reshaped(job, shape)) > _USABLE * gpu_bytes:
            too_large.append(shape)
        return shape not in too_large

    best = best_shape(wanted, room, valid, min_ranks=least, max_ranks=most)
    if not gpu_bytes or best == best_shape(wanted, wanted.world, valid, min_ranks=least, max_ranks=most):
        return best
    return best_shape(wanted, room, fits, min_ranks=least, max_ranks=most)


def shape_of(job: Job) -> Shape:
    """Returns the part of a job that a change of size affects."""
    return Shape(**job.mesh.axes, microbatches=job.pipeline.microbatches)


def reshaped(job: Job, shape: Shape) -> Job:
    """Returns the job on another mesh, with the same rows in every step. `layers_per_stage` holds
    for the job's own number of stages only."""
    if shape == shape_of(job):
        return job
    sizes = {axis.name: getattr(shape, axis.name) for axis in AXES}
    cut = job.pipeline.layers_per_stage if shape.pp == job.mesh.pp else None
    pipeline = {"microbatches": shape.microbatches, "layers_per_stage": cut}
    return job.model_copy(
        update={"mesh": job.mesh.model_copy(update=sizes), "pipeline": job.pipeline.model_copy(update=pipeline)}
    )


def reshape_event(before: Shape, after: Shape, why: str, attempt: int) -> Event:
    """Returns the event that the run continues on another mesh."""
    message = f"{_text(before)} → {_text(after)}: {why}"
    return Event("reshaped", message, attempt=attempt, details={"from": before.as_dict(), "to": after.as_dict()})


def _text(shape: Shape) -> str:
    sizes = {axis.name: getattr(shape, axis.name) for axis in AXES}
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "pp")
    return f"{axes} ({shape.world} rank{'s' if shape.world > 1 else ''}, {shape.microbatches} microbatches)"


class Decisions:
    """What was decided for the attempts of a run: once for each mesh, and kept in the store.
    `facts`: what submission knew of the cluster."""

    def __init__(self, store: ObjectStore, facts: Facts) -> None:
        self._store, self.facts = store, facts
        self._made: dict[tuple[Shape, Facts], Decision] = {}

    def make(self, job: Job, attempt: int, *, compiler: bool, network_gbps: float = 0.0) -> Decision:
        """Decides for an attempt, and writes it to the store, from which another controller reads
        it. `compiler`: whether all its nodes have a C compiler. `network_gbps`: of the slowest
        node; 0 if unknown. Raises StoreError: the store does not answer."""
        facts = replace(self.facts, compiler=compiler, network_gbps=network_gbps)
        key = shape_of(job), facts
        if key not in self._made:
            self._made[key] = decide(job, facts)
        write_decision(self._store, self._made[key], attempt)
        return self._made[key]
