"""What follows from a job and its devices: decided once, recorded, and shipped to every rank.

`planning.decide` makes a `Decision`: the controller for each new mesh, which sends it with the
seats and writes it beside the job; `raypp.rank` on rank 0. A rank imports this module and nothing
else of what plans.

Left to a rank is what only a measurement on its device shows: the attention kernel
(`train.attention: auto`), a deeper warm-up (`pipeline.lookahead: auto`), and how often it takes a
snapshot (`checkpoint.memory_every_steps: auto`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any, Literal

from pydantic import TypeAdapter

from raypp.errors import first_of, size_text
from raypp.job.job import Job
from raypp.job.precision import FP32, DtypeName
from raypp.planning.schedules.action import Program, without_idle_backwards
from raypp.planning.schedules.catalogue import build_forward_only, build_program
from raypp.planning.schedules.simulate import Simulator
from raypp.planning.seating import Placement

VERSION = 2
"""Goes up when an older raypp would misunderstand what is written."""
CERTAIN = 0.9
"""A job is refused only if this share of its planned memory is more than a device has."""
CUDA_CONTEXT = 700 * 10**6
"""The context with its kernels, and cuBLAS' workspace, which torch does not count: what an H200 has
in use after the first matrix product (driver 580, CUDA 13)."""
OWN_ALONE, OWN_FEWEST, OWN_WITH_PARTNER = 3, 3, 4
"""Files for a rank's own snapshots in memory: on a single node; with a partner on another node when
memory is short; and when it is not."""
COPIES = 2
"""Files for the copies of each rank that a rank is the partner of."""
TIER_SHARE = 0.8
"""Share of the available memory that snapshots take at most."""

Kind = Literal["cpu", "cuda"]
"""The kind of device; kernels differ in what they keep."""
WireKind = Literal[DtypeName, "int8"]


@dataclass(frozen=True)
class Wire:
    """Formats in which activations travel down a pipeline and gradients back up."""

    activations: WireKind
    gradients: WireKind


@dataclass(frozen=True)
class ResolvedPipeline:
    """The schedule, the cut and the placement of a job. The program follows from them.

    Attributes:
        schedule: Name of the schedule; auto resolved.
        lookahead: Extra warm-up forwards; auto is 0 until links have been measured.
        microbatches: Per replica and step.
        input_weight: Cost of the embedding in the cut, in layers.
        output_weight: Cost of norm, projection and loss in the cut, in layers.
        placement: How the schedule places stages: "loop" or "v".
        stages_of_rank: Stages of every pipeline rank, ascending.
        whole_backwards: Backwards are not split, whatever the schedule does: blocks are compiled in
            a way that cannot be split.
        wire: Formats in which activations and gradients travel between stages.
    """

    schedule: str
    lookahead: int
    microbatches: int
    cut: tuple[int, ...]
    input_weight: float
    output_weight: float
    placement: Placement
    stages_of_rank: tuple[tuple[int, ...], ...]
    whole_backwards: bool
    trained: tuple[bool, ...]
    wire: Wire

    @property
    def num_stages(self) -> int:
        return len(self.cut)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline ranks, stages per rank, microbatches: inputs of `build_program`."""
        return len(self.stages_of_rank), len(self.stages_of_rank[0]), self.microbatches

    @cached_property
    def layers_of_stage(self) -> tuple[range, ...]:
        """Global layer indices of every stage."""
        return tuple(range(a, b) for a, b in pairwise([0, *accumulate(self.cut)]))

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        holder = {stage: rank for rank, stages in enumerate(self.stages_of_rank) for stage in stages}
        return tuple(holder[stage] for stage in range(self.num_stages))

    @property
    def stage_weights(self) -> list[float]:
        """Cost of every stage, in layers. Both ends of the model count as in the cut."""
        weights = [float(layers) for layers in self.cut]
        weights[0] += self.input_weight
        weights[-1] += self.output_weight
        return weights

    @cached_property
    def program(self) -> Program:
        """Actions of every pipeline rank, in order. Raises JobError: the schedule does not exist or
        does not support these sizes."""
        return self._program(self.lookahead)

    def program_with(self, lookahead: int) -> Program:
        """Returns the program with another warm-up depth. Placement and cut stay the same. Raises
        JobError: the schedule does not support it."""
        return self.program if lookahead == self.lookahead else self._program(lookahead)

    def _program(self, lookahead: int) -> Program:
        program = build_program(self.schedule, *self.sizes, lookahead, whole_backwards=self.whole_backwards)
        program = without_idle_backwards(program, self.trained)
        return MappingProxyType({rank: tuple(program[rank]) for rank in sorted(program)})

    def simulator(self, lookahead: int | None = None) -> Simulator:
        """Returns the simulator of the program, or of the one with another warm-up depth. Kept,
        because a plan simulates the same programs with the times of several devices. Raises
        JobError: the schedule does not support the depth."""
        depth = self.lookahead if lookahead is None else lookahead
        if depth not in self._simulators:
            self._simulators[depth] = Simulator(self.program_with(depth))
        return self._simulators[depth]

    @cached_property
    def _simulators(self) -> dict[int, Simulator]:
        return {}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ResolvedPipeline:
        """Reads the pipeline of a decision's document. Raises ValueError: it is none."""
        pipeline = _PIPELINE.validate_python(document["pipeline"])
        if sorted(chain(*pipeline.stages_of_rank)) != list(range(pipeline.num_stages)):
            raise ValueError("pipeline.stages_of_rank does not name each stage once")
        return pipeline

    def forward_program(self) -> Program:
        """Returns a program of forwards only, on the same stages, for evaluation."""
        return build_forward_only(*self.sizes, self.placement)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by purpose.

    Attributes:
        weights: Parameters, frozen ones in `model.lora.base`; this rank's share under fsdp · cp.
        gradients: Of trained parameters; this rank's share.
        optimizer: State of the optimizer for them, residuals of int8 sums (train.sync) and, on a
            CPU, the state of outer steps; this rank's share.
        gathered: Under fsdp, cp, dp_replicate or bf16: the weights in the compute dtype, and
            gradients until they are reduced.
        activations: What forwards in flight keep for their backwards.
        logits: The loss, on the last stage.
        working: What the action at the peak needs for itself: gradients of activations, recomputed
            activations, the gradient of one matrix before it is added, a dequantised matrix.
        messages: Receives that are posted ahead, sends that are not known to have arrived, and the
            step's token ids.
        runtime: Libraries, the device's context, the groups' buffers, and what the allocator keeps.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    working: int = 0
    messages: int = 0
    runtime: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


_BLOCK = 256
"""Numbers in int8 or int4 that share an fp32 scale."""


def sent_bytes(job: Job, numbers: float, kind: str) -> float:
    """Returns the bytes that a rank sends to sum `numbers` numbers over the replicas. An exact sum
    is a ring: (n - 1) / n of the numbers go around twice. In int8 or int4, every replica sends its
    numbers to every other."""
    replicas = job.mesh.dp_replicate
    if bits := {"int8": 8, "outer": job.train.sync.bits}.get(kind):
        return (replicas - 1) * numbers * (_BLOCK * bits / 8 + 4) / _BLOCK
    each = FP32.bytes if kind == "outer" else job.train.dtypes.reduce.bytes  # the mean of fp32 weights, or sums
    return 2 * (replicas - 1) / replicas * numbers * each


@dataclass(frozen=True)
class Facts:
    """What a decision takes into account of a cluster.

    Attributes:
        gpus: GPUs of each node that has some.
        cards: Names of these GPUs, one of each node at least; "" for one that is not known.
        memory: Bytes of the smallest of them; 0 if unknown.
        precision: What `train.precision: auto` is on them.
        compiler: Whether every node has a C compiler.
        network_gbps: Gbit/s of one connection to another node, of the slowest; 0 if unknown.
    """

    device: Kind = "cpu"
    gpus: tuple[int, ...] = ()
    cards: tuple[str, ...] = ()
    memory: int = 0
    precision: DtypeName = "bf16"
    compiler: bool = True
    network_gbps: float = 0.0

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Facts:
        """Reads the facts that a process of the same raypp sent as JSON data."""
        return _FACTS.validate_python(document)


@dataclass(frozen=True)
class Decision:
    """What was decided for a job on one mesh; the same on every rank.

    Attributes:
        job: The job as ranks run it: with its precision, the base of its adapters, when gradients
            are reduced, the steps between outer steps, and whether blocks are compiled.
        in_flight: Microbatches in flight of every stage at most.
        activation_bytes: Of a token of a microbatch in flight, by stage.
        depth_bytes: Planned memory of the rank that needs most, by depth of the warm-up, from 0;
            empty where the depth is not chosen by measurement.
        offloaded: Bytes that every pipeline rank keeps in host memory instead of on its device.
        ctas_words: Why; "" without messages on GPUs.
        flops_per_token: FLOPs of forward and backward without attention; recomputation not counted.
        flops_per_key: The same of a query and one key that it sees, in one layer.
        peak_tflops: TFLOP/s of a GPU by its data sheet in the dtype of products; 0: unknown.
        remarks: What was decided for `auto`, in words, by key.
    """

    job: Job
    facts: Facts
    pipeline: ResolvedPipeline
    memory: tuple[RankMemory, ...]
    in_flight: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    depth_bytes: tuple[int, ...]
    offloaded: tuple[int, ...]
    ctas: int
    ctas_words: str
    remarks: dict[str, str]
    flops_per_token: float = 0.0
    flops_per_key: float = 0.0
    peak_tflops: float = 0.0

    def flops(self, documents: Iterable[int]) -> float:
        """Returns the model's FLOPs for documents of these lengths, in tokens. A query sees all
        tokens of its document up to its own, or the last W of them."""
        lengths = Counter(documents)
        keys = sum(
            layers * count * min(window or n, n) * (n - min(window or n, n) / 2)
            for window, layers in self._windows.items()
            for n, count in lengths.items()
        )
        return self.flops_per_token * sum(n * count for n, count in lengths.items()) + self.flops_per_key * keys

    @cached_property
    def _windows(self) -> Counter[int | None]:
        model = self.job.model
        return Counter(model.attention_rule(index).window for index in range(model.num_layers))

    @property
    def needs(self) -> list[int]:
        """Planned bytes of every pipeline rank."""
        return [memory.total for memory in self.memory]

    def depths_within(self, memory: int) -> Callable[[int, object], bool] | None:
        """Returns a function that tells whether a depth of the warm-up fits into a device by plan.
        `memory`: its bytes; 0: unknown, so any depth fits (None)."""
        if not memory or not self.depth_bytes:
            return None
        return lambda depth, _program: depth < len(self.depth_bytes) and self.depth_bytes[depth] <= memory

    def document(self, **changes: Any) -> dict[str, Any]:
        """Returns the decision as JSON data, with some fields replaced."""
        return {"version": VERSION, **_SHAPE.dump_python(self, mode="json"), **changes}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Decision:
        """Reads the decision that a process of the same raypp made (`document`)."""
        return _SHAPE.validate_python({name: document[name] for name in cls.__dataclass_fields__})


_SHAPE, _FACTS, _PIPELINE = TypeAdapter(Decision), TypeAdapter(Facts), TypeAdapter(ResolvedPipeline)


def too_little(needs: Sequence[int], capacity: int) -> str:
    """Returns which pipeline ranks certainly need more memory than a device has; "" if none does.
    `needs`: planned bytes of every pipeline rank."""
    large = [f"pp{rank} {size_text(need)}" for rank, need in enumerate(needs) if CERTAIN * need > capacity]
    if not large:
        return ""
    return f"a device has {size_text(capacity)}; ranks are planned to need more: {first_of(large, 8)}"
