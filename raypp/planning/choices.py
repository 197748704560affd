"""What a job file leaves open, decided: the schedule, the cut, the lookahead. The same wherever the job is read."""

from __future__ import annotations

from raypp.errors import JobError
from raypp.mesh.cut import balance, balance_ranks, cut_layers, no_layer
from raypp.mesh.stage_placement import Placement, place_stages
from raypp.planning.weights import end_weights
from raypp.schedules.action import Program
from raypp.schedules.catalogue import build_program, schedule_named
from raypp.spec.job import Job


def schedule_of(job: Job) -> str:
    """The schedule's name; auto is interleaved_1f1b with several stages per rank, 1f1b with one.

    With fewer microbatches than pipeline ranks, where 1F1B has no steady state: looped_bfs and gpipe.
    """
    pipeline = job.pipeline
    if pipeline.schedule != "auto":
        return pipeline.schedule
    several, enough = pipeline.stages_per_rank > 1, pipeline.microbatches >= job.mesh.pp
    if several:
        return "interleaved_1f1b" if enough else "looped_bfs"
    return "1f1b" if enough else "gpipe"


def lookahead_of(job: Job) -> int:
    """Extra warm-up forwards; auto is 0, the classic warm-up, as long as no link has been measured."""
    return 0 if job.pipeline.lookahead == "auto" else job.pipeline.lookahead


def cut_of(job: Job) -> list[int]:
    """Layers of every stage: `pipeline.layers_per_stage`, else by the weights of the model's ends.

    Weights that came from "auto" give the cheapest cut in which every stage has a layer; given ones the cut of
    `cut_layers`. Stages in a V are balanced by rank (`balance_ranks`): one rank has both ends.

    Raises:
        JobError: A stage would have no layer.
    """
    pipeline, layers, stages = job.pipeline, job.model.num_layers, job.num_stages
    if pipeline.layers_per_stage is not None:
        return list(pipeline.layers_per_stage)
    first, last = end_weights(job)
    placement = _placement(job)
    if placement == "v" and stages <= layers:
        return balance_ranks(layers, place_stages(job.mesh.pp, stages, placement), first, last)
    if "auto" not in (pipeline.input_weight, pipeline.output_weight):
        return cut_layers(layers, stages, first, last)
    if stages > layers:
        raise JobError(no_layer(layers, stages, first, last, pipeline.stages_per_rank))
    return balance([1.0] * layers, stages, first, last)


def _placement(job: Job) -> Placement:
    """Where the schedule puts stages; of a schedule that does not exist, which is told elsewhere, the usual."""
    try:
        return schedule_named(schedule_of(job)).placement
    except JobError:
        return "loop"


def program_of(job: Job) -> tuple[list[list[int]], Program]:
    """Stages of every pipeline rank, and what each computes, in order.

    Raises:
        JobError: The schedule does not exist, or cannot do these sizes.
    """
    name, pp, pipeline = schedule_of(job), job.mesh.pp, job.pipeline
    program = build_program(name, pp, pipeline.stages_per_rank, pipeline.microbatches, lookahead_of(job))
    return place_stages(pp, job.num_stages, schedule_named(name).placement), program
