"""A job's pipeline with every open choice resolved.

`resolve_pipeline` is the only function that derives schedule, cut, placement and wire formats from
a job. `planning.check` resolves the choices one by one, to report every problem at once.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.lora import lowest_trained, quantised_base, trains
from raypp.job.precision import DTYPES, FP32
from raypp.planning.activations import microbatch_tokens
from raypp.planning.cut import balance, balance_ranks, cut_layers, no_layer
from raypp.planning.decision import ResolvedPipeline, Wire, WireKind
from raypp.planning.flops import end_weights, recompute_factor
from raypp.planning.schedules.catalogue import schedule_named
from raypp.planning.seating import Placement, place_stages


def schedule_of(job: Job) -> str:
    """Returns the schedule's name. auto is interleaved_1f1b with several stages per rank, 1f1b with
    one. With fewer microbatches than pipeline ranks, 1F1B has no steady state; auto is then
    looped_bfs or gpipe."""
    pipeline = job.pipeline
    if pipeline.schedule != "auto":
        return pipeline.schedule
    enough = pipeline.microbatches >= job.mesh.pp
    if pipeline.stages_per_rank > 1:
        return "interleaved_1f1b" if enough else "looped_bfs"
    return "1f1b" if enough else "gpipe"


def lookahead_of(job: Job) -> int:
    """Returns the extra warm-up forwards; auto is 0 (classic) until links are measured."""
    return 0 if job.pipeline.lookahead == "auto" else job.pipeline.lookahead


def cut_of(job: Job) -> list[int]:
    """Returns the layers of every stage: `pipeline.layers_per_stage`, else a balanced cut. Weights
    that are "auto" give the cheapest cut in which every stage has a layer; layers below all
    adapters have a forward only. Explicit weights give the cut of `cut_layers`. Stages in a V are
    balanced by rank (`balance_ranks`), because one rank has both ends of the model. Raises
    JobError: a stage would have no layer."""
    pipeline, layers, stages = job.pipeline, job.model.num_layers, job.num_stages
    if pipeline.layers_per_stage is not None:
        return list(pipeline.layers_per_stage)
    first, last = end_weights(job)
    placement = _placement(job)
    if placement != "v" and "auto" not in (pipeline.input_weight, pipeline.output_weight):
        return cut_layers(layers, stages, first, last, pipeline.stages_per_rank)
    if stages > layers:  # the cuts below give every stage a layer, whatever the ends weigh
        raise JobError(no_layer(layers, stages, 0, 0, pipeline.stages_per_rank))
    if placement == "v":
        return balance_ranks(layers, place_stages(job.mesh.pp, stages, placement), first, last)
    frozen = lowest_trained(job.model)
    return list(_balanced(layers, stages, first, last, frozen, frozen and round(1 / (1 + recompute_factor(job)), 4)))


@lru_cache(maxsize=512)
def _balanced(layers: int, stages: int, first: float, last: float, frozen: int, forward: float) -> tuple[int, ...]:
    """Returns the balanced cut of layers of which the lowest `frozen` have no backward. Those cost
    `forward`, the others 1. A search asks for the same cut many times."""
    return tuple(balance([forward] * frozen + [1.0] * (layers - frozen), stages, first, last))


def _placement(job: Job) -> Placement:
    """Returns the schedule's placement; "loop" for an unknown one, which is reported elsewhere."""
    try:
        return schedule_named(schedule_of(job)).placement
    except JobError:
        return "loop"


def wire_of(job: Job) -> Wire:
    """Returns the formats of a job's messages, the compute dtype by default."""
    wire = job.pipeline.wire
    compute = job.train.dtypes.compute
    plain = min(compute, DTYPES.get(wire.dtype, compute), key=lambda dtype: dtype.bytes).name

    def kind(what: Literal["activations", "gradients"]) -> WireKind:
        compression = wire.of(what)
        return plain if compression == "none" else compression

    return Wire(kind("activations"), kind("gradients"))


def wire_bytes(job: Job, form: WireKind) -> int:
    """Returns the bytes of a message in a wire format; int8 also sends an fp32 scale per token.
    Each rank of a tp group sends its part of the tokens."""
    width = job.model.hidden_size
    each = width + FP32.bytes if form == "int8" else width * DTYPES[form].bytes
    return -(-microbatch_tokens(job) // job.mesh.tp) * each


def splits_compiled(job: Job) -> bool:
    """Whether a compiled block's backward can be split: not in a model of one's own, nor with
    products in fp8, for which the compiler rounds gradients in another place than in a whole
    backward."""
    in_fp8 = job.train.dtypes.fp8 or quantised_base(job.model) == "fp8"
    return ":" not in job.model.kind and not in_fp8


def whole_backwards(job: Job) -> bool:
    """Whether backwards are not split, whatever the schedule does."""
    return job.train.compiles and not splits_compiled(job)


def resolve_pipeline(job: Job) -> ResolvedPipeline:
    """Resolves everything that `mesh.pp` and `pipeline` leave open. Raises JobError: the schedule
    does not exist or does not support these sizes, or a stage would have no layer. `check_plan`
    reports all such problems at once."""
    name, pp, pipeline, cut = schedule_of(job), job.mesh.pp, job.pipeline, cut_of(job)
    layers_of_stage = (range(a, b) for a, b in pairwise([0, *accumulate(cut)]))
    first, last = end_weights(job)
    placement = schedule_named(name).placement
    resolved = ResolvedPipeline(
        schedule=name,
        lookahead=lookahead_of(job),
        microbatches=pipeline.microbatches,
        cut=tuple(cut),
        input_weight=first,
        output_weight=last,
        placement=placement,
        stages_of_rank=tuple(map(tuple, place_stages(pp, job.num_stages, placement))),
        whole_backwards=whole_backwards(job),
        trained=tuple(
            trains(job.model, layers, first=index == 0, last=index == len(cut) - 1)
            for index, layers in enumerate(layers_of_stage)
        ),
        wire=wire_of(job),
    )
    assert resolved.program  # raises for sizes that the schedule does not support
    return resolved
