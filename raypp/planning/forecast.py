"""Forecasts a step on given machines: compute, links, collectives, the bottleneck.

A step consists of reading and agreeing, gathering weights, the schedule (simulated with the times
of each stage and boundary), reducing gradients, and the update. Work that overlaps with the
schedule is counted as if it did not, except for messages between stages, which the simulator
overlaps with compute, for sums over replicas (`planning.replica_sum_costs`), and for what is
offloaded: a stage takes as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raypp.mesh.geometry import Mesh, of_pipeline_rank
from raypp.planning.activations import Kind, microbatch_tokens
from raypp.planning.choose_lookahead import best_depth, cards_of_nodes, depths, fits_by_plan
from raypp.planning.costs import Costs
from raypp.planning.end_weights import activation_bytes, sum_bytes
from raypp.planning.machines import Machines, Node, message_bytes
from raypp.planning.memory import RankMemory, gathered_bytes, memories, memory_kind, stage_trained, state_of
from raypp.planning.offload import moved_per_token, offload_assumption, update_seconds
from raypp.planning.replica_sum_costs import ReplicaSums, replica_sums
from raypp.planning.resolve import ResolvedPipeline, resolve_pipeline
from raypp.planning.traffic import (
    MOST_LISTED,
    MOST_ON_CARDS,
    Border,
    LinkUse,
    Sharded,
    border_between,
    collectives,
    gatherings,
    layer_traffic,
    link_of_replicas,
    link_uses,
    nodes_of_pipeline,
)
from raypp.schedules.simulate import Simulator, StageTimes, Timeline
from raypp.spec.job import Job
from raypp.spec.lora import lowest_trained
from raypp.spec.precision import FP32

_SHOWN = (
    "device", "step_s", "tokens_per_s", "bubble", "parts", "lookahead", "links", "bottleneck", "advice", "peak_memory",
    "device_memory", "measured", "assumptions", "replica_sums",
)  # fmt: skip
"""What `raypp plan --json` shows of a forecast, in this order."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on given machines.

    Attributes:
        step_s: Seconds of a step.
        tokens_per_s: Of all replicas, with every row full.
        bubble: Idle fraction of the ranks' time within the schedule, including waits for links.
        parts: Seconds by part: other, unshard, pipeline, reduce, optimizer.
        lookahead: Extra warm-up forwards that the forecast assumes.
        stage_s: Seconds of compute of each pipeline rank in a step.
        links: The cables that pipelines cross, busiest first; at most `MOST_LISTED`.
        memory: Of every pipeline rank.
        bottleneck: Description of what a step waits for most.
        device_memory: Bytes of a device; 0: unknown.
        measured: Which inputs were measured: "costs", "links".
        assumptions: Description of each; where costs and links come from.
        replica_sums: Sums of gradients over replicas; None without replicas.
        device: cpu, cuda, the given kind of device, or measured; empty if nobody asked for one.
        advice: Single changes that would help, and the fraction of the step's time that each saves.
            Empty if nobody asked, for programs with very many actions, and for very many ranks.
    """

    step_s: float
    tokens_per_s: float
    bubble: float
    parts: Mapping[str, float]
    lookahead: int
    stage_s: tuple[float, ...]
    links: tuple[LinkUse, ...]
    memory: tuple[RankMemory, ...]
    bottleneck: str
    device_memory: int
    measured: tuple[str, ...]
    assumptions: tuple[str, ...]
    replica_sums: ReplicaSums | None = None
    device: str = ""
    advice: tuple[tuple[str, float], ...] = ()

    @property
    def peak_memory(self) -> int:
        """Bytes of the rank that needs most."""
        return max(memory.total for memory in self.memory)

    def as_dict(self) -> dict[str, Any]:
        """Returns what `raypp plan --json` shows."""
        return {name: getattr(self, name) for name in _SHOWN}


def forecast(
    job: Job,
    machines: Machines,
    costs: Costs,
    device_memory: int = 0,
    pipeline: ResolvedPipeline | None = None,
    kind: Kind | None = None,
) -> Forecast:
    """Forecasts a step of a job.

    Args:
        job: A job in which `check_plan` finds no problem.
        machines: The machines it runs on.
        costs: Costs of a device of speed 1.
        device_memory: Bytes of a device; limits the lookahead that `auto` chooses. 0: unlimited.
        pipeline: The job's resolved pipeline, if known.
        kind: The kind of device whose memory is planned; None: the job's.

    Raises:
        ResourcesError: The job has more ranks than the machines have devices.
        JobError: Its schedule does not support its sizes.
    """
    mesh, pipeline, kind = Mesh.of(job.mesh), pipeline or resolve_pipeline(job), kind or memory_kind(job)
    seats = machines.seats(mesh, apart=job.outer is not None)
    cut, holder = pipeline.cut, pipeline.rank_of_stage
    size = message_bytes(job)
    borders = [border_between(mesh, seats, machines, upper, lower, size) for upper, lower in pairwise(holder)]
    slowest_of = [min(node.speed for node in of_pipeline_rank(mesh, seats, rank)) for rank in range(job.mesh.pp)]
    speeds = [slowest_of[rank] for rank in holder]
    times = _stage_times(job, machines, mesh, seats, costs, cut, speeds, borders, size)
    apart = sum(map(len, pipeline.program.values())) > MOST_ON_CARDS
    if not apart:
        times = replace(times, cards=cards_of_nodes(holder, nodes_of_pipeline(mesh, seats)))

    lookahead, simulator, timeline = _simulated(job, pipeline, times, device_memory, kind)
    free = simulator.run(replace(times, link=0.0)) if any(border.seconds for border in borders) else timeline
    memory = tuple(memories(job, pipeline, simulator, kind))
    unshard, reduce, optimizer = _outside_schedule(job, machines, mesh, seats, costs, pipeline, kind)
    between = link_of_replicas(machines, mesh, seats)
    summed = replica_sums(job, pipeline, timeline, between, [border.seconds for border in borders], kind)
    parts = {
        "other": costs.step_s,
        "unshard": unshard,
        "pipeline": timeline.makespan,
        "reduce": reduce + (summed.exposed_s if summed is not None else 0.0),
        "optimizer": optimizer,
    }
    step_s = sum(parts.values())
    tokens = job.rows_per_step * job.data.seq_len
    busy = tuple(timeline.busy)
    used, cables = link_uses(machines, borders, simulator, times, timeline, pipeline.microbatches, size, step_s)
    remarks = []
    if apart and cables > 1:
        remarks.append("messages of different borders share no card (the program is very long)")
    if cables > MOST_LISTED:
        remarks.append(f"of {cables:,} cables between nodes, the {MOST_LISTED:,} busiest are listed")
    return Forecast(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        parts=parts,
        bubble=timeline.bubble,
        lookahead=lookahead,
        stage_s=busy,
        links=tuple(used),
        memory=memory,
        bottleneck=_bottleneck(step_s, parts, busy, timeline, free, used),
        device_memory=device_memory,
        measured=tuple(name for name, source in (("costs", costs), ("links", machines)) if source.measured),
        assumptions=(
            costs.source,
            machines.source,
            *offload_assumption(job, machines.inside_gbps),
            *remarks,
        ),
        replica_sums=summed,
    )


def _simulated(
    job: Job, pipeline: ResolvedPipeline, times: StageTimes, device_memory: int, kind: Kind
) -> tuple[int, Simulator, Timeline]:
    """Returns the lookahead, chosen where the job leaves it open, its simulator, and a step."""
    lookahead = job.pipeline.lookahead
    if lookahead != "auto":
        simulator = pipeline.simulator(lookahead)
        return lookahead, simulator, simulator.run(times)
    fits = fits_by_plan(job, pipeline, device_memory, kind)
    best = best_depth(depths(pipeline.simulator, pipeline.microbatches, times, fits=fits))
    return best.lookahead, best.simulator, best.timeline


def _outside_schedule(
    job: Job,
    machines: Machines,
    mesh: Mesh,
    seats: Sequence[Node],
    costs: Costs,
    pipeline: ResolvedPipeline,
    kind: Kind,
) -> tuple[float, float, float]:
    """Returns seconds of the gathers of weights, of the sums of gradients, and of the update."""
    cut, placement = pipeline.cut, pipeline.stages_of_rank
    gathered = [_sharded(job, [gathered_bytes(job, stage, cut) for stage in stages]) for stages in placement]
    trained = [_sharded(job, [stage_trained(job, stage, cut) for stage in stages]) for stages in placement]
    slowest = min(node.speed for node in seats)
    sent = collectives(job, machines, mesh, seats, gathered, trained)
    copied = _copies(job, costs, gathered, trained)
    unshard, reduce = (a + b / slowest for a, b in zip(sent, copied, strict=True))
    unshard *= gatherings(job, pipeline.program)
    updated = max(one.rest + one.experts for one in trained) / job.mesh.shards
    update = costs.optimizer_s * updated / slowest
    return unshard, reduce, update + _state_copies(job, machines, costs, pipeline, kind)


def _sharded(job: Job, stages: Sequence[tuple[int, int]]) -> Sharded:
    """Returns what ranks share of these stages, from all of it and what belongs to experts."""
    whole = sum(count for count, _ in stages)
    apart = sum(experts for _, experts in stages) if job.mesh.ep > 1 else 0
    return Sharded(whole - apart, apart, job.mesh.shards, job.mesh.ep)


def _stage_times(
    job: Job,
    machines: Machines,
    mesh: Mesh,
    seats: Sequence[Node],
    costs: Costs,
    cut: Sequence[int],
    speeds: Sequence[float],
    borders: Sequence[Border],
    size: int,
) -> StageTimes:
    within = layer_traffic(job, machines, mesh, seats)
    forward, backward, end, below = [], [], len(cut) - 1, lowest_trained(job.model)
    for stage, (layers, speed) in enumerate(zip(cut, speeds, strict=True)):
        back = min(layers, max(0, sum(cut[: stage + 1]) - below))  # its layers that have a backward
        f, b = layers * costs.layer.forward, back * costs.layer.backward
        for part, here in ((costs.first, stage == 0), (costs.last, stage == end)):
            if here:
                f, b = f + part.forward, b + part.backward
        crossed = sum(bool(borders[s].seconds) for s in (stage - 1, stage) if 0 <= s < end)
        copying = crossed * size * costs.copy_s
        moving = microbatch_tokens(job) * moved_per_token(job, stage, cut) * 8 / (machines.inside_gbps * 1e9)
        forward.append(max(f / job.mesh.cp / speed, moving) + layers * within + copying)
        backward.append(max(b / job.mesh.cp / speed, moving) + 2 * back * within + copying)
    links = [border.seconds for border in borders]
    return StageTimes(forward, backward, costs.input_share, links, costs.weight_share, first_whole=True)


def _copies(job: Job, costs: Costs, gathered: Sequence[Sharded], trained: Sequence[Sharded]) -> tuple[float, float]:
    """Returns the seconds of local copies for gathering weights once and reducing gradients.

    They add to the time on the wire.

    FSDP copies for replicas too, although nothing is sent if nothing is sharded.
    """
    shards, copies = job.mesh.shards, job.summed_replicas
    if shards * copies == 1:
        return 0.0, 0.0
    each = 2 * costs.copy_s  # a rank sends as much as it receives
    local = costs.gather_s / activation_bytes(job)
    replicas = each * 2 * (copies - 1) / copies / shards * FP32.bytes

    def gather(one: Sharded) -> float:
        return local * one.held + each * (one.rest_sent + one.experts_sent)

    def reduce(one: Sharded) -> float:
        sent = each * sum_bytes(job) * (one.rest_sent + one.experts_sent)
        return costs.sum_s * one.held + sent + replicas * (one.rest + one.experts)

    return max(map(gather, gathered)), max(map(reduce, trained))


def _state_copies(job: Job, machines: Machines, costs: Costs, pipeline: ResolvedPipeline, kind: Kind) -> float:
    """Returns the seconds that an update takes longer because the state is in host memory."""
    moved = max(state_of(job, stages, pipeline.cut, "cuda").host for stages in pipeline.stages_of_rank)
    # On a CPU, copies there and back share its memory.
    return 2 * moved * costs.copy_s if kind == "cpu" else update_seconds(job, moved, machines.inside_gbps)


def _bottleneck(
    step_s: float,
    parts: Mapping[str, float],
    busy: Sequence[float],
    timeline: Timeline,
    free: Timeline,
    links: Sequence[LinkUse],
) -> str:
    """Describes what a step waits for most."""
    exposed = timeline.makespan - free.makespan
    outside = max((name for name in parts if name != "pipeline"), key=lambda name: parts[name])
    most = max(range(len(busy)), key=lambda rank: busy[rank])
    bubble = free.makespan - busy[most]
    worst = max(((exposed, "link"), (parts[outside], outside), (bubble, "bubble")), key=lambda entry: entry[0])
    link_note = ""
    if links:
        link = links[0]
        hidden = "hidden" if exposed < 0.02 * step_s else f"{exposed / step_s:.0%} of the step not hidden"
        link_note = f"; the link between {link.nodes[0]} and {link.nodes[1]} is {link.busy:.0%} busy, {hidden}"
    if worst[0] < (0.15 if worst[1] == "bubble" else 0.1) * step_s:
        return f"compute: pipeline rank {most} computes {busy[most] / step_s:.0%} of the step{link_note}"
    words = {
        "link": f"links: {exposed / step_s:.0%} of the step waits for messages",
        "bubble": f"the pipeline's fill and drain: {bubble / step_s:.0%} of the step",
        "unshard": f"gathering weights (fsdp): {parts['unshard'] / step_s:.0%} of the step",
        "reduce": f"reducing gradients (fsdp, dp_replicate): {parts['reduce'] / step_s:.0%} of the step",
        "optimizer": f"the optimizer: {parts['optimizer'] / step_s:.0%} of the step",
        "other": f"reading data and agreeing on lengths: {parts['other'] / step_s:.0%} of the step",
    }
    return words[worst[1]] + link_note
