"""A job's pipeline with every open choice resolved: decided once, then passed on.

`resolve_pipeline` is the only function that derives schedule, cut, placement, program and wire
formats from a job. The plan, the controller and every rank derive the record from the same job
file, so they agree without communication. `planning.check` resolves the choices one by one, to
report every problem at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Literal

from raypp.errors import JobError
from raypp.mesh.cut import balance, balance_ranks, cut_layers, no_layer
from raypp.mesh.seating import Placement, place_stages
from raypp.planning.activations import microbatch_tokens
from raypp.planning.flops import end_weights, recompute_factor
from raypp.schedules.action import Action, Program, without_idle_backwards
from raypp.schedules.catalogue import build_forward_only, build_program, schedule_named
from raypp.schedules.simulate import Simulator
from raypp.spec.job import Job
from raypp.spec.lora import lowest_trained, trains
from raypp.spec.precision import DTYPES, FP32, DtypeName

WireKind = Literal[DtypeName, "int8"]


@dataclass(frozen=True)
class Wire:
    """Formats in which activations travel down a pipeline and gradients back up."""

    activations: WireKind
    gradients: WireKind


def schedule_of(job: Job) -> str:
    """Returns the schedule's name.

    auto is interleaved_1f1b with several stages per rank, 1f1b with one. With fewer microbatches
    than pipeline ranks, 1F1B has no steady state; auto is then looped_bfs or gpipe.
    """
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
    """Returns the layers of every stage: `pipeline.layers_per_stage`, else a balanced cut.

    Weights that are "auto" give the cheapest cut in which every stage has a layer; layers below all
    adapters have a forward only. Explicit weights
    give the cut of `cut_layers`. Stages in a V are balanced by rank (`balance_ranks`), because one
    rank has both ends of the model.

    Raises:
        JobError: A stage would have no layer.
    """
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
    """Returns the balanced cut of layers of which the lowest `frozen` have no backward.

    Those cost `forward`, the others 1. A search asks for the same cut many times.
    """
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
    """Returns the bytes of a message in a wire format; int8 also sends an fp32 scale per token."""
    width = job.model.hidden_size
    each = width + FP32.bytes if form == "int8" else width * DTYPES[form].bytes
    return microbatch_tokens(job) * each


@dataclass(frozen=True)
class ResolvedPipeline:
    """The schedule, the cut and the program of a job.

    Attributes:
        schedule: Name of the schedule; auto resolved.
        lookahead: Extra warm-up forwards; auto is 0 until links have been measured.
        microbatches: Per replica and step.
        cut: Number of layers of every stage.
        input_weight: Cost of the embedding in the cut, in layers.
        output_weight: Cost of norm, projection and loss in the cut, in layers.
        layers_of_stage: Global layer indices of every stage.
        placement: How the schedule places stages: "loop" or "v".
        stages_of_rank: Stages of every pipeline rank, ascending.
        rank_of_stage: Pipeline rank of every stage.
        whole_backwards: Backwards are not split, whatever the schedule does: blocks are compiled.
        trained: Whether a stage has parameters that are trained, by stage.
        program: Actions of every pipeline rank, in order.
        wire: Formats in which activations and gradients travel between stages.
    """

    schedule: str
    lookahead: int
    microbatches: int
    cut: tuple[int, ...]
    input_weight: float
    output_weight: float
    layers_of_stage: tuple[range, ...]
    placement: Placement
    stages_of_rank: tuple[tuple[int, ...], ...]
    rank_of_stage: tuple[int, ...]
    whole_backwards: bool
    trained: tuple[bool, ...]
    program: Program
    wire: Wire

    @property
    def num_stages(self) -> int:
        return len(self.cut)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline ranks, stages per rank, microbatches: inputs of `build_program`."""
        return len(self.stages_of_rank), len(self.stages_of_rank[0]), self.microbatches

    @property
    def stage_weights(self) -> list[float]:
        """Cost of every stage, in layers. Both ends of the model count as in the cut."""
        weights = [float(layers) for layers in self.cut]
        weights[0] += self.input_weight
        weights[-1] += self.output_weight
        return weights

    def program_with(self, lookahead: int) -> Program:
        """Returns the program with another warm-up depth. Placement and cut stay the same.

        Raises:
            JobError: The schedule does not support it.
        """
        if lookahead == self.lookahead:
            return self.program
        program = build_program(self.schedule, *self.sizes, lookahead, whole_backwards=self.whole_backwards)
        return _fixed(without_idle_backwards(program, self.trained))

    def simulator(self, lookahead: int | None = None) -> Simulator:
        """Returns the simulator of the program, or of the one with another warm-up depth.

        Kept, because a plan simulates the same programs with the times of several devices.

        Raises:
            JobError: The schedule does not support the depth.
        """
        depth = self.lookahead if lookahead is None else lookahead
        if depth not in self._simulators:
            self._simulators[depth] = Simulator(self.program_with(depth))
        return self._simulators[depth]

    @cached_property
    def _simulators(self) -> dict[int, Simulator]:
        return {}

    def forward_program(self) -> Program:
        """Returns a program of forwards only, on the same stages, for evaluation."""
        return build_forward_only(*self.sizes, self.placement)


def resolve_pipeline(job: Job) -> ResolvedPipeline:
    """Resolves everything that `mesh.pp` and `pipeline` leave open.

    Raises:
        JobError: The schedule does not exist or does not support these sizes, or a stage would have
            no layer. `check_plan` reports all such problems at once.
    """
    name, lookahead, pp, pipeline = schedule_of(job), lookahead_of(job), job.mesh.pp, job.pipeline
    cut = cut_of(job)
    layers_of_stage = tuple(range(a, b) for a, b in pairwise([0, *accumulate(cut)]))
    trained = tuple(trains(job.model, layers) for layers in layers_of_stage)
    sizes = pp, pipeline.stages_per_rank, pipeline.microbatches
    program = build_program(name, *sizes, lookahead, whole_backwards=job.train.compiles)
    program = without_idle_backwards(program, trained)
    placement = schedule_named(name).placement
    stages_of_rank = place_stages(pp, job.num_stages, placement)
    holder = {stage: rank for rank, stages in enumerate(stages_of_rank) for stage in stages}
    first, last = end_weights(job)
    return ResolvedPipeline(
        schedule=name,
        lookahead=lookahead,
        microbatches=pipeline.microbatches,
        cut=tuple(cut),
        input_weight=first,
        output_weight=last,
        layers_of_stage=layers_of_stage,
        placement=placement,
        stages_of_rank=tuple(map(tuple, stages_of_rank)),
        rank_of_stage=tuple(holder[stage] for stage in range(job.num_stages)),
        whole_backwards=job.train.compiles,
        trained=trained,
        program=_fixed(program),
        wire=wire_of(job),
    )


def _fixed(program: Program) -> Mapping[int, Sequence[Action]]:
    return MappingProxyType({rank: tuple(program[rank]) for rank in sorted(program)})
