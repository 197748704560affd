"""A job's pipeline with every open choice resolved: decided once, then passed on.

`resolve_pipeline` is the only function that derives schedule, cut, placement, program and wire
formats from a job. The plan, the controller and every rank derive the record from the same job
file, so they agree without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType

from raypp.mesh.seating import Placement, place_stages
from raypp.planning.choices import Wire, cut_of, lookahead_of, schedule_of, wire_of
from raypp.planning.end_weights import end_weights
from raypp.schedules.action import Action, Program, without_idle_backwards
from raypp.schedules.catalogue import build_forward_only, build_program, schedule_named
from raypp.schedules.simulate import Simulator
from raypp.spec.job import Job
from raypp.spec.lora import trains


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
    program = build_program(name, *sizes, lookahead, whole_backwards=job.train.compile)
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
        whole_backwards=job.train.compile,
        trained=trained,
        program=_fixed(program),
        wire=wire_of(job),
    )


def _fixed(program: Program) -> Mapping[int, Sequence[Action]]:
    return MappingProxyType({rank: tuple(program[rank]) for rank in sorted(program)})
