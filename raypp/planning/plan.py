"""The plan of a job: who holds what, in which order."""

from __future__ import annotations

from raypp.mesh.cut import cut_layers
from raypp.mesh.place import place_stages
from raypp.planning.weights import end_weights
from raypp.schedules import gpipe, one_f_one_b
from raypp.schedules.action import Program
from raypp.spec.job import Job


def layer_cut(job: Job) -> list[int]:
    """Layers of each stage: the job's own cut, or the cheapest by cost."""
    if job.pipeline.layers_per_stage is not None:
        return list(job.pipeline.layers_per_stage)
    return cut_layers(job.model.num_layers, job.num_stages, *end_weights(job))


def stage_program(job: Job) -> tuple[list[list[int]], Program]:
    """Stages of each pipeline rank, and what every rank computes."""
    pp = job.mesh.pp
    build = {"gpipe": gpipe.build, "1f1b": one_f_one_b.build}[job.pipeline.schedule]
    return place_stages(pp, job.num_stages), build(pp, job.pipeline.stages_per_rank, job.pipeline.microbatches)
