"""What a job file leaves open, one choice per function: the schedule, the lookahead, the cut, the wire formats.

`planning.resolve` takes them together. `planning.check` asks for them one by one, to tell every problem at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypp.errors import JobError
from raypp.mesh.cut import balance, balance_ranks, cut_layers, no_layer
from raypp.mesh.stage_placement import Placement, place_stages
from raypp.planning.weights import end_weights
from raypp.schedules.catalogue import schedule_named
from raypp.spec.job import Job

WireKind = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class Wire:
    """How activations go down a pipeline and gradients come back up."""

    activations: WireKind
    gradients: WireKind


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


def wire_of(job: Job) -> Wire:
    """How a job's messages travel: as computed, unless `pipeline.wire` says otherwise."""
    wire = job.pipeline.wire
    plain: WireKind = "bf16" if "bf16" in (wire.dtype, job.train.precision) else "fp32"

    def kind(what: Literal["activations", "gradients"]) -> WireKind:
        compression = wire.of(what)
        return plain if compression == "none" else compression

    return Wire(kind("activations"), kind("gradients"))
