"""What cannot work, before anything is reserved."""

from __future__ import annotations

from raypp.errors import JobError, Problem
from raypp.planning.plan import layer_cut
from raypp.spec.job import Job


def check_plan(job: Job) -> list[Problem]:
    """Problems of mesh, model and schedule taken together."""
    problems = []
    if job.pipeline.microbatches < job.mesh.pp and job.pipeline.schedule == "1f1b":
        problems.append(
            Problem(
                "pipeline.microbatches",
                f"{job.pipeline.microbatches} microbatches for {job.mesh.pp} pipeline ranks",
                f"use at least {job.mesh.pp} microbatches, or gpipe",
            )
        )
    try:
        layer_cut(job)
    except JobError as error:
        problems.extend(error.problems)
    return problems
