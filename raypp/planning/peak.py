"""The device memory that a job's ranks need at their peaks."""

from __future__ import annotations

from raypp.planning.activations import Kind
from raypp.planning.memory import rank_memory
from raypp.planning.resolve import resolve_pipeline
from raypp.schedules.repeats import without_repeats
from raypp.schedules.waiting import waiting_sends
from raypp.spec.job import Job


def memory_of_ranks(job: Job, kind: Kind | None = None) -> list[int]:
    """Returns the bytes of every pipeline rank at its peak."""
    pipeline = resolve_pipeline(job)
    waiting = waiting_sends(pipeline.program)
    actions = {rank: without_repeats(line, waiting[rank]) for rank, line in pipeline.program.items()}
    return [
        rank_memory(job, stages, pipeline.cut, actions[rank], waiting[rank], kind).total
        for rank, stages in enumerate(pipeline.stages_of_rank)
    ]


def peak_memory(job: Job, kind: Kind | None = None) -> int:
    """Returns the bytes of the rank that needs most."""
    return max(memory_of_ranks(job, kind))
