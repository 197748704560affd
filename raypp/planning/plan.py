"""The plan of a job: which rank holds what, in which order it computes, and what it costs.

Needs no cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from pydantic_core import to_jsonable_python

from raypp.errors import JobError, Problem, ResourcesError, first_of
from raypp.job.job import Job
from raypp.job.optimizer_groups import matched, trained_names
from raypp.planning.costs import DEVICES, Costs, Device, computed_costs, host_remark
from raypp.planning.decide import decide, decide_reduction, fp16_remark, settle
from raypp.planning.decision import Decision, RankMemory, ResolvedPipeline
from raypp.planning.flops import flops_per_token
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.geometry import Mesh
from raypp.planning.host_memory import HostMemory, host_memory, offload_problems
from raypp.planning.machines import Boundary, Machines, boundaries
from raypp.planning.offload import offload_in_words
from raypp.planning.replica_sum_costs import hidden_exchanges
from raypp.planning.schedules import picture
from raypp.planning.schedules.action import printed, splits_backward
from raypp.planning.schedules.catalogue import build_program
from raypp.planning.schedules.simulate import Slot, StageTimes
from raypp.planning.search import advice, tensor_remark
from raypp.planning.sizes import sizes_of, sizes_remark
from raypp.records import Coordinates

_FEWEST, _LONGER = 10, 0.05
"""The fewest steps between outer steps that `auto` chooses, and the share of a step that they may
add to it."""
_MOST_ADVISED = 16_384
"""Actions of a program beyond which its changes are not simulated: each takes long."""
_MOST_RANKS_ADVISED = 32_768
"""Ranks beyond which changes are not forecast either."""
_MOST_NAMES = 6


@dataclass(frozen=True)
class Grounds:
    """Inputs of a prediction. What is not given is assumed.

    Attributes:
        machines: Nodes and links.
        costs: Measured costs.
        device: Kind of device (`DEVICES`).
        link_gbps: Rate between any two nodes, in Gbit/s, shared by the devices of a node.
        per_node: Devices per node; None: each pipeline rank has separate nodes.
        inside_gbps: Rate between two devices of a node; None: that of the kind of device.
    """

    machines: Machines | None = None
    costs: Costs | None = None
    device: str | None = None
    link_gbps: float | None = None
    per_node: int | None = None
    inside_gbps: float | None = None

    def machines_for(self, job: Job) -> Machines:
        """Returns the given machines, or as many as the job needs."""
        inside = self.inside_gbps or self.devices_for(job)[-1].inside_gbps
        if self.machines is not None:
            measured = self.machines.links.items()
            links = {nodes: link for nodes, link in measured if self.inside_gbps is None or len(nodes) > 1}
            return replace(self.machines, inside_gbps=inside, links=links)
        return Machines.alike(job.mesh.world, self._per_node(job), self.link_gbps, 0.0, inside)

    def _per_node(self, job: Job) -> int:
        return self.per_node or max(1, job.mesh.world // job.mesh.pp)

    def assumed(self, job: Job) -> str:
        """Returns what nothing said of the nodes and what to type, if it matters; else ""."""
        each, nodes, few = self._per_node(job), job.mesh.pp, min(job.mesh.world, 8)
        if self.machines or self.per_node or nodes == 1 or self.devices_for(job)[-1].kind == "cpu":
            return ""
        links = "" if self.link_gbps else " with free links"
        of = f"{nodes} nodes of {each} device{'' if each == 1 else 's'} each{links}"
        more = "" if self.link_gbps else "; for the link of each node, --link-gbps X"
        return f"assumed: {of}; if {few} devices share a node, add --per-node {few}{more}"

    def devices_for(self, job: Job) -> list[Device]:
        """Returns the kinds of device to predict for."""
        if self.device is not None:
            return [DEVICES[self.device]]
        if job.resources.device != "auto":
            return [DEVICES[job.resources.device]]
        kinds = ("cpu", "cuda") if self.costs is None else (self.costs.kind,)
        return [DEVICES[kind] for kind in kinds]


def predict(job: Job, pipeline: ResolvedPipeline, grounds: Grounds) -> list[Forecast]:
    """Returns one forecast per device that the job may run on. These are both if resources.device
    is auto and costs are unknown. `pipeline` is that of the last one's job. Raises ResourcesError:
    the given machines have fewer devices than the job has ranks."""
    devices, forecasts = grounds.devices_for(job), []
    for device in devices:
        own = settle(job, device.facts)
        cut = pipeline if device is devices[-1] else None
        costs, machines = grounds.costs or computed_costs(own, device), grounds.machines_for(own)
        prediction = forecast(own, machines, costs, device.memory, cut, device.kind)
        basis = grounds.costs or device
        few = own.mesh.world <= _MOST_RANKS_ADVISED and sum(map(len, pipeline.program.values())) <= _MOST_ADVISED
        prediction = replace(
            prediction,
            device="measured" if costs.measured else device.name,
            advice=tuple(advice(own, machines, basis, prediction, device.memory, device.kind)) if few else (),
            assumptions=(*prediction.assumptions, "every row is data.seq_len tokens long"),
        )
        forecasts.append(prediction)
    return forecasts


def with_every_steps(job: Job, grounds: Grounds) -> tuple[Job, str]:
    """Decides `train.sync.every_steps: auto` for the last device of `predict`. Returns the job, and
    the decision in words, "" if there was none, with the fragments and overlap_steps that would
    allow fewer steps. Raises JobError: the rate between replicas is unknown."""
    if job.outer is None or job.outer.every_steps != "auto" or job.mesh.dp_replicate == 1:
        return job, ""
    if job.outer.link_gbps is None and grounds.machines is None and grounds.link_gbps is None:
        fault = "auto needs the rate of the link between replicas"
        fix = "set train.sync.link_gbps, or a number; `raypp plan` takes --links and --link-gbps, and proposes one"
        raise JobError(Problem("train.sync.every_steps", fault, fix))
    choices, device = job.outer_intervals(), grounds.devices_for(job)[-1]
    own = settle(job, device.facts).with_every_steps(choices[-1])
    costs, machines = grounds.costs or computed_costs(own, device), grounds.machines_for(own)
    prediction = forecast(own, machines, costs, device.memory, kind=device.kind)
    sums = prediction.replica_sums
    assert sums is not None
    waits, rest = sums.exposed_s * choices[-1], prediction.step_s - sums.exposed_s
    enough = [steps for steps in choices if steps >= _FEWEST and waits <= _LONGER * rest * steps]
    decided = min(enough, default=choices[-1])
    remark = f"train.sync.every_steps: auto is {decided}"
    ways = [
        (steps, way.train.sync)
        for way in hidden_exchanges(own, sums, rest)
        for steps in way.outer_intervals()
        if _FEWEST <= steps < decided
    ]
    if ways:
        steps, sync = min(ways, key=lambda way: way[0])
        remark += f"; with fragments: {sync.fragments} and overlap_steps: {sync.overlap_steps}, which change"
        remark += f" the numbers, too, {steps}"
    return job.with_every_steps(decided), remark


@dataclass(frozen=True)
class PlannedRank:
    """The part of one rank. `label`: as `pp0-fsdp1`. `layers`: first and last of each stage."""

    rank: int
    coordinates: Coordinates
    label: str
    stages: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """What a job will do and cost.

    Attributes:
        axes: Length of every mesh axis, and ep.
        input_weight: Cost of the embedding in the cut, in layers.
        output_weight: Cost of norm, projection and loss, in layers.
        schedule, lookahead: auto resolved; extra warm-up forwards.
        microbatches: Per replica and step.
        program: Actions of every pipeline rank on one line: `0F0 0F1 0B0 …`.
        timeline: The program with equal stages, backwards twice as long as forwards, and free
            links; times in forwards.
        picture: The timeline as text.
        bubble_fraction: Idle fraction of a step by the textbook, (P - 1) / (v·m + P - 1).
        bubble_overhead: Idle time relative to work by the textbook, (P - 1) / (v·m).
        simulated_bubble: Idle fraction of this program, with the cut's costs and free links.
        in_flight: Largest number of microbatches in flight, by stage.
        memory_device: The kind of device that `memory` is planned for: cpu or cuda.
        host: Host memory of the node that needs most.
        link_bytes_per_step: Over a pipeline's busiest boundary, in its busier direction.
        link_gbps: The given rate, in Gbit/s.
        link_s_per_microbatch: Seconds of the largest message at that rate; None without a rate.
        tokens_per_step: Tokens of all replicas with every row full.
        flops_per_token, flops_per_step: Of forward and backward.
        predictions: Step times under stated assumptions, one per kind of device.
        decision: What a run on such devices is given (`planning.decide`); in JSON without its job.
        remarks: Which numbers are not the model's own, and what runs otherwise than the schedule
            says, and why.
        assumed: What nothing said of the nodes, and what to type.
        reduce_gradients: `mesh.reduce_gradients`; auto resolved.
    """

    name: str
    world: int
    axes: Mapping[str, int]
    ranks: tuple[PlannedRank, ...]
    cut: tuple[int, ...]
    input_weight: float
    output_weight: float
    placement: tuple[tuple[int, ...], ...]
    schedule: str
    lookahead: int
    microbatches: int
    program: tuple[str, ...]
    timeline: Mapping[int, Sequence[Slot]]
    picture: str
    bubble_fraction: float
    bubble_overhead: float
    simulated_bubble: float
    in_flight: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    memory_device: str
    host: HostMemory
    boundaries: tuple[Boundary, ...]
    link_bytes_per_step: int
    link_gbps: float | None
    link_s_per_microbatch: float | None
    parameters: int
    tokens_per_step: int
    flops_per_token: float
    flops_per_step: float
    predictions: tuple[Forecast, ...]
    decision: Decision
    remarks: tuple[str, ...] = ()
    assumed: str = ""
    reduce_gradients: str = "last_microbatch"

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step on the last kind of device that was predicted for."""
        return self.predictions[-1].step_s

    @property
    def fits(self) -> bool | None:
        """Whether that device has the memory; None: its memory is unknown."""
        last = self.predictions[-1]
        return last.peak_memory <= last.device_memory if last.device_memory else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain JSON values, without the timeline, which `program` implies."""
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "timeline"}
        for empty in ("remarks", "assumed"):
            if not shown[empty]:
                del shown[empty]
        shown["memory"] = [memory.as_dict() for memory in self.memory]
        shown["decision"] = {key: value for key, value in self.decision.document().items() if key != "job"}
        shown["predictions"] = [prediction.as_dict() for prediction in self.predictions]
        return cast(dict[str, Any], to_jsonable_python(shown))


def make_plan(job: Job, grounds: Grounds | None = None) -> Plan:
    """Plans a job in which `check_plan` finds no problem. Raises JobError: the job has a problem
    that `check_plan` would report; ResourcesError: the given machines have fewer devices than the
    job has ranks, or too little host memory for what it offloads."""
    grounds = grounds or Grounds()
    link_gbps = grounds.link_gbps
    kind = grounds.devices_for(job)[-1].kind
    job, decided = with_every_steps(job, grounds)
    asked, device, machines = job, grounds.devices_for(job)[-1], grounds.machines_for(job)
    job, reduction = decide_reduction(settle(job, device.facts), machines, device.memory, kind)
    decision = decide(job, device.facts)
    job, mesh, pipeline, memory = decision.job, Mesh.of(job.mesh), decision.pipeline, decision.memory
    crossing = boundaries(job, pipeline)
    drawn = pipeline.simulator().run(StageTimes.equal(pipeline.num_stages))
    forward = pipeline.stage_weights  # in forwards of a layer; a backward takes twice as long
    costed = pipeline.simulator().run(StageTimes(forward, [2.0 * time for time in forward]))
    largest = max((b.bytes_per_microbatch for b in crossing if b.crosses_ranks), default=0)
    tokens = job.rows_per_step * job.data.seq_len
    per_token = flops_per_token(job)
    remarks = (
        decided,
        reduction,
        sizes_remark(job.model),
        fp16_remark(asked, device.facts) if grounds.device else "",
        _backwards_remark(pipeline),
        host_remark(job, device, splits_backward(pipeline.program)),
        offload_in_words(job, kind == "cpu"),
        *recipe_remarks(job),
    )
    if mesh.world <= _MOST_RANKS_ADVISED and sum(map(len, pipeline.program.values())) <= _MOST_ADVISED:
        own = settle(asked, device.facts)
        remarks = (*remarks, tensor_remark(own, machines, grounds.costs or device, device.memory, kind))
    if problems := offload_problems(job, machines.free_memory, kind):
        raise ResourcesError(problems)
    pp, stages_per_rank, microbatches = pipeline.sizes
    return Plan(
        name=job.name,
        world=mesh.world,
        axes=job.mesh.axes,
        ranks=tuple(_rank_map(mesh, pipeline)),
        cut=pipeline.cut,
        input_weight=pipeline.input_weight,
        output_weight=pipeline.output_weight,
        placement=pipeline.stages_of_rank,
        schedule=pipeline.schedule,
        lookahead=pipeline.lookahead,
        microbatches=microbatches,
        program=tuple(printed(pipeline.program[rank]) for rank in range(pp)),
        timeline=drawn.slots,
        picture="".join(text for text, _ in picture.drawn(drawn.slots)),
        bubble_fraction=bubble_fraction(pp, microbatches, stages_per_rank),
        bubble_overhead=bubble_overhead(pp, microbatches, stages_per_rank),
        simulated_bubble=costed.bubble,
        in_flight=tuple(drawn.in_flight),
        memory=memory,
        memory_device=kind,
        host=host_memory(job, pipeline, memory, machines, kind),
        boundaries=tuple(crossing),
        link_bytes_per_step=microbatches * largest,
        link_gbps=link_gbps,
        link_s_per_microbatch=largest * 8 / (link_gbps * 1e9) if link_gbps else None,
        parameters=sizes_of(job.model).whole,
        tokens_per_step=tokens,
        flops_per_token=per_token,
        flops_per_step=per_token * tokens,
        predictions=tuple(predict(asked, pipeline, grounds)),
        decision=decision,
        remarks=tuple(remark for remark in remarks if remark),
        assumed=grounds.assumed(job),
        reduce_gradients=job.mesh.reduce_gradients,
    )


def _backwards_remark(pipeline: ResolvedPipeline) -> str:
    """Returns a remark if a schedule that splits backwards runs whole ones; else ""."""
    if not pipeline.whole_backwards or not splits_backward(build_program(pipeline.schedule, *pipeline.sizes)):
        return ""
    return (
        f"{pipeline.schedule} splits backwards, but compiled blocks in fp8, or of your own, do not: every backward "
        "is whole, and the bubbles that weight gradients would fill stay (train.compile)"
    )


def _rank_map(mesh: Mesh, pipeline: ResolvedPipeline) -> list[PlannedRank]:
    layers = [(held.start, held.stop - 1) for held in pipeline.layers_of_stage]
    spans = [tuple(layers[stage] for stage in stages) for stages in pipeline.stages_of_rank]
    return [
        PlannedRank(rank, place, place.label(mesh.sizes), pipeline.stages_of_rank[place.pp], spans[place.pp])
        for rank, place in enumerate(mesh.places())
    ]


def bubble_fraction(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Returns idle time as a fraction of the whole step: (P - 1) / (v·m + P - 1)."""
    return (pp - 1) / (stages_per_rank * microbatches + pp - 1)


def bubble_overhead(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Returns idle time relative to compute time: (P - 1) / (v·m)."""
    return (pp - 1) / (stages_per_rank * microbatches)


def recipe_remarks(job: Job) -> Iterator[str]:
    """Yields what follows from keys that count in shares, or change something on the way."""
    schedule, train = job.train.lr_schedule, job.train
    first, length = train.decay
    if schedule.kind == "wsd" or schedule.decay_steps is not None or schedule.warmup_ratio is not None:
        falls = "" if schedule.kind == "constant" else f", falls in steps {first + 1:,} to {first + length:,}"
        yield f"train.lr_schedule: the rate rises in {train.warmup_steps:,} steps{falls}"
    if train.global_batch is not None:
        each = (
            f"{job.mesh.replicas} replicas × {train.micro_batch_size} rows × {job.pipeline.microbatches} microbatches"
        )
        yield f"train.global_batch: {job.rows_per_step:,} rows, {each}"
    if job.checkpoint.best is not None:
        most = job.checkpoint.keep + job.checkpoint.best.keep
        yield f"checkpoint.best: up to {most} checkpoints are kept, and one more while it is saved"
    groups = train.optimizer.groups
    for index, (group, names) in enumerate(zip(groups, matched(trained_names(job.model), groups), strict=True)):
        decay = "" if group.weight_decay is None else f", weight_decay {group.weight_decay:g}"
        what = first_of(names, _MOST_NAMES) or "by the names of your own model"
        yield f"train.optimizer.groups[{index}]: lr × {group.lr_factor:g}{decay}: {what}"
    for phase in job.data.phases:
        weights = job.data.weights_at(phase.from_step)
        names = [part.name or f"parts[{index}]" for index, part in enumerate(job.data.parts or ())]
        shares = ", ".join(f"{name} {weight / sum(weights):.1%}" for name, weight in zip(names, weights, strict=True))
        yield f"data.phases: rows from step {phase.from_step:,} on: {shares}"
