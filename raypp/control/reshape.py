"""Puts a job on another mesh than its own."""

from __future__ import annotations

from raypp.planning.check import check_plan
from raypp.records import Event
from raypp.recovery.elastic_shape import Shape, best_shape
from raypp.spec.job import Job


def best_for(job: Job, room: int) -> Shape | None:
    """Returns the best mesh for at most `room` ranks, of those the job allows; None when there is
    none."""
    wanted, options = shape_of(job), job.recovery.elastic_options
    if options is None:
        return wanted if room >= wanted.world else None
    return best_shape(
        wanted,
        room,
        lambda shape: not check_plan(reshaped(job, shape)),
        min_ranks=options.min_ranks,
        max_ranks=options.max_ranks,
    )


def shape_of(job: Job) -> Shape:
    """Returns the part of a job that a change of size affects."""
    mesh = job.mesh
    return Shape(mesh.pp, mesh.dp_replicate, mesh.fsdp, mesh.cp, mesh.ep, job.pipeline.microbatches)


def reshaped(job: Job, shape: Shape) -> Job:
    """Returns the job on another mesh, with the same rows in every step.

    `layers_per_stage` holds for the job's own number of stages only.
    """
    if shape == shape_of(job):
        return job
    sizes = {"pp": shape.pp, "dp_replicate": shape.dp_replicate, "fsdp": shape.fsdp}
    cut = job.pipeline.layers_per_stage if shape.pp == job.mesh.pp else None
    pipeline = {"microbatches": shape.microbatches, "layers_per_stage": cut}
    return job.model_copy(
        update={
            "mesh": job.mesh.model_copy(update=sizes),
            "pipeline": job.pipeline.model_copy(update=pipeline),
        }
    )


def reshape_event(before: Shape, after: Shape, why: str, attempt: int) -> Event:
    """Returns the event that the run continues on another mesh."""
    message = f"{_text(before)} → {_text(after)}: {why}"
    return Event("reshaped", message, attempt=attempt, details={"from": _facts(before), "to": _facts(after)})


def _facts(shape: Shape) -> dict[str, int]:
    names = ("pp", "dp_replicate", "fsdp", "cp", "ep", "microbatches")
    return {name: getattr(shape, name) for name in names}


def _text(shape: Shape) -> str:
    sizes = {axis: getattr(shape, axis) for axis in ("pp", "dp_replicate", "fsdp", "cp")}
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "pp")
    return f"{axes} ({shape.world} rank{'s' if shape.world > 1 else ''}, {shape.microbatches} microbatches)"
