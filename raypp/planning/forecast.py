"""Forecasts a step on given machines: compute, links, collectives, the bottleneck.

A step consists of reading and agreeing, gathering weights, the schedule (simulated with the times
of each stage and boundary), reducing gradients, and the update. The simulator overlaps messages
between stages with compute, `planning.replica_sum_costs` sums over replicas, and of what is
offloaded a stage takes as long as the slower of the two. On GPUs, FSDP gathers and sums a block
beside the compute of another: what takes longer than that counts, and a share of the rest
(`_TAKEN`). On CPUs both count as if they did not overlap. The ranks of a tp
group divide what a layer computes, but not the host's launches, and wait for each of their
messages.

Messages that cross the same boundary over the same node's cable take turns: if `n` pipelines cross
from one node to another at the same place, each gets an `n`-th of the cable's rate. Messages of one
pipeline that cross different boundaries share a node's cable only while both are on their way
(`schedules.shared_cards`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import pairwise
from typing import Any

from raypp.job.job import Job
from raypp.job.known_families import counted_family
from raypp.job.lora import lowest_trained
from raypp.job.tensor_parts import keeps_parts
from raypp.planning.activations import microbatch_tokens
from raypp.planning.choose_lookahead import best_depth, cards_of_nodes, depths
from raypp.planning.costs import Costs, CostsOf, computed_costs, context_bytes
from raypp.planning.decide import decide_reduction
from raypp.planning.decision import Kind, RankMemory, ResolvedPipeline
from raypp.planning.geometry import Mesh, of_pipeline_rank
from raypp.planning.machines import INSIDE_GBPS, Link, Machines, message_bytes
from raypp.planning.memory import gathered_bytes, memories, memory_kind, stage_trained, state_of
from raypp.planning.offload import moved_per_token, offload_in_words
from raypp.planning.replica_sum_costs import ReplicaSums, replica_sums
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.schedules.simulate import Simulator, StageTimes, Timeline
from raypp.planning.sizes import sizes_of

_TAKEN = 0.1
"""Seconds by which a second of a collective slows the compute beside it: its kernel holds
processors and takes bandwidth of the memory. Assumed."""
_MOST_LISTED = 1024
"""Most cables in a forecast: those of large meshes are alike."""
_MOST_ON_CARDS = 4096
"""Actions of a program beyond which messages of different boundaries are taken to share no card: a
simulation that knows about cards takes several times as long."""
_MOST_LINKS = 16
"""With more cables than this, the gain from each one is not simulated."""
_SHOWN = (
    "device", "step_s", "tokens_per_s", "bubble", "parts", "lookahead", "links", "bottleneck", "advice", "peak_memory",
    "device_memory", "measured", "assumptions", "replica_sums",
)  # fmt: skip
"""What `raypp plan --json` shows of a forecast, in this order."""


@dataclass(frozen=True)
class LinkUse:
    """Use of the cable between two nodes, in its busier direction. `bytes_per_step`: activations or
    gradients of all pipelines that cross here. `message_s`: seconds per message, including the
    share of others on the cable. `busy`: fraction of the step in which the busier of the two nodes'
    cards is in use, in one direction, by this link or others. `exposed_s`: seconds by which a step
    would be shorter if the cable were free."""

    nodes: tuple[str, str]
    gbps: float
    bytes_per_step: int
    message_s: float
    busy: float
    exposed_s: float


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on given machines.

    Attributes:
        tokens_per_s: Of all replicas, with every row full.
        bubble: Idle fraction of the ranks' time within the schedule, including waits for links.
        parts: Seconds by part: other, unshard, pipeline, reduce, optimizer.
        stage_s: Seconds of compute of each pipeline rank in a step.
        links: The cables that pipelines cross, busiest first; at most `_MOST_LISTED`.
        device_memory: Bytes of a device; 0: unknown.
        measured: Which inputs were measured: "costs", "links".
        assumptions: Description of each; where costs and links come from.
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
    pipeline: ResolvedPipeline
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
    costs: CostsOf,
    device_memory: int = 0,
    pipeline: ResolvedPipeline | None = None,
    kind: Kind | None = None,
) -> Forecast:
    """Forecasts a step of a job.

    Args:
        job: A job in which `check_plan` finds no problem.
        costs: Costs of a device of speed 1, or of which kind of device.
        device_memory: Bytes of a device; limits the lookahead that `auto` chooses. 0: unlimited.
        kind: The kind of device whose memory is planned; None: the job's.

    Raises:
        ResourcesError: The job has more ranks than the machines have devices.
        JobError: Its schedule does not support its sizes.
    """
    pipeline, kind = pipeline or resolve_pipeline(job), kind or memory_kind(job)
    job, _ = decide_reduction(job, machines, device_memory, kind, pipeline)
    costs = costs if isinstance(costs, Costs) else computed_costs(job, costs)
    return _Step(job, machines, costs, pipeline, kind).forecast(device_memory)


@dataclass(frozen=True)
class _Border:
    """The boundary between stages `s` and `s + 1` of all pipelines. `crossings` counts the
    concurrent messages between two nodes."""

    crossings: Mapping[tuple[str, str], int]
    seconds: float


@dataclass(frozen=True)
class _Sharded:
    """Bytes, or numbers, of a pipeline rank's weights that its fsdp · cp ranks share. A ring over n
    ranks passes (n - 1) / n of the bytes through each link. `rest`: of all weights but experts that
    ep spreads. `experts`: of those, on all ep ranks together. FSDP shards an ep-th over every ep-th
    rank. `ep`: mesh.ep."""

    rest: float
    experts: float
    shards: int
    ep: int

    @property
    def held(self) -> float:
        """What a rank has once it is gathered."""
        return self.rest + self.experts / self.ep

    @property
    def rest_sent(self) -> float:
        """What the ring of all shards passes through each link."""
        return self.rest * (1 - 1 / self.shards)

    @property
    def experts_sent(self) -> float:
        """What each ring over every ep-th rank passes through each link."""
        return self.experts * (1 / self.ep - 1 / self.shards)


@dataclass(frozen=True)
class _TensorTraffic:
    """Seconds of the messages among a tp group, for a microbatch: of gathering the tokens of one
    block, as long as spreading its result; in a layer's forward, and in its backward."""

    one: float
    forward: float
    backward: float


class _Step:
    """A step of a job on machines; see `forecast`."""

    def __init__(self, job: Job, machines: Machines, costs: Costs, pipeline: ResolvedPipeline, kind: Kind) -> None:
        self._job, self._machines, self._costs, self._pipeline, self._kind = job, machines, costs, pipeline, kind
        self._mesh = Mesh.of(job.mesh)
        self._seats = machines.seats(self._mesh, apart=job.outer is not None)
        self._size = message_bytes(job)
        self._borders = [self._border(upper, lower) for upper, lower in pairwise(pipeline.rank_of_stage)]
        self._apart = sum(map(len, pipeline.program.values())) > _MOST_ON_CARDS
        whole, ep = self._mesh.groups(("fsdp", "cp")), self._mesh.ep
        self._ring = self._slowest(whole) if job.mesh.shards > 1 else None
        apart = [group[i::ep] for group in whole for i in range(ep)]
        self._experts_ring = self._slowest(apart) if job.mesh.shards > 1 else None
        self._within = self._layer_traffic()
        self._tensor = self._tensor_traffic()
        self._host_gbps = min(machines.inside_gbps, INSIDE_GBPS)  # PCIe, whatever is between devices

    def forecast(self, device_memory: int) -> Forecast:
        """Forecasts the step; `device_memory` limits the lookahead that `auto` chooses."""
        job, costs, pipeline = self._job, self._costs, self._pipeline
        times = self._times()
        lookahead, simulator, timeline = self._simulated(times, device_memory)
        seconds = [border.seconds for border in self._borders]
        free = simulator.run(replace(times, link=0.0)) if any(seconds) else timeline
        unshard, reduce, optimizer = self._outside_schedule()
        between = self._slowest(self._mesh.groups("dp_replicate"))
        summed = replica_sums(job, pipeline, timeline, between, seconds, self._kind)
        parts = {
            "other": costs.step_s,
            "unshard": unshard,
            "pipeline": timeline.makespan,
            "reduce": reduce + (summed.exposed_s if summed is not None else 0.0),
            "optimizer": optimizer,
        }
        step_s = sum(parts.values())
        busy = tuple(timeline.busy)
        used, cables = self._link_uses(simulator, times, timeline, step_s)
        remarks, inside = [], self._machines.inside_gbps
        if any(node.devices > 1 for node in self._machines.nodes):
            remarks.append(f"{inside:,g} Gbit/s ({inside / 8:,.4g} GB/s) between devices of a node")
        if offload_in_words(job, cpu=False):
            rate = f"{self._host_gbps:g} Gbit/s each way between host memory and a device"
            remarks.append(f"{rate} (a PCIe 4.0 slot of 16 lanes has 252)")
        if self._apart and cables > 1:
            remarks.append("messages of different borders share no card (the program is very long)")
        if cables > _MOST_LISTED:
            remarks.append(f"of {cables:,} cables between nodes, the {_MOST_LISTED:,} busiest are listed")
        return Forecast(
            step_s=step_s,
            tokens_per_s=job.rows_per_step * job.data.seq_len / step_s,
            parts=parts,
            bubble=timeline.bubble,
            lookahead=lookahead,
            stage_s=busy,
            links=tuple(used),
            memory=tuple(memories(job, pipeline, simulator, self._kind)),
            pipeline=pipeline,
            bottleneck=_bottleneck(step_s, parts, busy, timeline, free, used),
            device_memory=device_memory,
            measured=tuple(name for name, source in (("costs", costs), ("links", self._machines)) if source.measured),
            assumptions=(costs.source, self._machines.source, *remarks),
            replica_sums=summed,
        )

    def _border(self, upper: int, lower: int) -> _Border:
        """Returns the boundary with the time of its slowest message if all pipelines send."""
        if upper == lower:
            return _Border({}, 0.0)
        senders, receivers = (of_pipeline_rank(self._mesh, self._seats, rank) for rank in (upper, lower))
        pairs = Counter((a.name, b.name) for a, b in zip(senders, receivers, strict=True))
        leaving, arriving = Counter[str](), Counter[str]()
        crossings = {(a, b): count for (a, b), count in pairs.items() if a != b}
        for (a, b), count in crossings.items():
            leaving[a] += count
            arriving[b] += count
        seconds = 0.0
        for a, b in pairs:
            link = self._machines.between(a, b)
            if link is not None:
                share = max(leaving[a] or 1, arriving[b] or 1) if a != b else 1
                seconds = max(seconds, link.latency_s + share * self._size * 8 / (link.gbps * 1e9))
        return _Border(crossings, seconds)

    def _times(self) -> StageTimes:
        job, costs, pipeline = self._job, self._costs, self._pipeline
        cut, holder, within, borders = pipeline.cut, pipeline.rank_of_stage, self._within, self._borders
        nodes = [of_pipeline_rank(self._mesh, self._seats, rank) for rank in range(job.mesh.pp)]
        forward, backward, end, below = [], [], len(cut) - 1, lowest_trained(job.model)
        for stage, layers in enumerate(cut):
            speed = min(node.speed for node in nodes[holder[stage]])
            back = min(layers, max(0, sum(cut[: stage + 1]) - below))  # its layers that have a backward
            f, b = layers * costs.layer.forward, back * costs.layer.backward
            split, sent = job.mesh.cp * job.mesh.tp, (stage in (0, end)) * self._tensor.one  # for the ends
            for part, here in ((costs.first, stage == 0), (costs.last, stage == end)):
                if here:
                    f, b = f + part.forward, b + part.backward
            moving = microbatch_tokens(job) * moved_per_token(job, stage, cut) * 8 / (self._host_gbps * 1e9)
            gathered, summed, *_ = self._beside(stage, speed)
            forward.append(max(f / split / speed, moving) + layers * (within + self._tensor.forward) + sent + gathered)
            backward.append(
                max(b / split / speed, moving) + back * (2 * within + self._tensor.backward) + sent + summed
            )
        links = [border.seconds for border in borders]
        times = StageTimes(forward, backward, costs.input_share, links, costs.weight_share, first_whole=True)
        if self._apart:
            return times
        # The nodes of the first pipeline's ranks, as numbers; others are placed alike.
        names = [own[0].name for own in nodes]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return replace(times, cards=cards_of_nodes(holder, [numbers[name] for name in names]))

    def _simulated(self, times: StageTimes, device_memory: int) -> tuple[int, Simulator, Timeline]:
        """Returns the lookahead, chosen where the job leaves it open, its simulator, and a step."""
        pipeline, lookahead = self._pipeline, self._job.pipeline.lookahead
        if lookahead != "auto":
            simulator = pipeline.simulator(lookahead)
            return lookahead, simulator, simulator.run(times)

        def fits(_depth: int, one: Simulator) -> bool:
            ranks = memories(self._job, pipeline, one, self._kind)
            return not device_memory or all(rank.total <= device_memory for rank in ranks)

        best = best_depth(depths(pipeline.simulator, pipeline.microbatches, times, fits=fits))
        return best.lookahead, best.simulator, best.timeline

    def _outside_schedule(self) -> tuple[float, float, float]:
        """Returns seconds of the gathers of weights, the sums of gradients, and the update."""
        job, costs, pipeline = self._job, self._costs, self._pipeline
        gathered, trained = self._sharded(gathered_bytes), self._sharded(stage_trained)
        slowest = min(node.speed for node in self._seats)
        if costs.kind == "cuda":
            waits = [self._beside(stage, slowest)[2:] for stage in range(pipeline.num_stages)]
            unshard, reduce = (
                max(sum(waits[stage][part] for stage in stages) for stages in pipeline.stages_of_rank)
                for part in (0, 1)
            )
        else:
            unshard, reduce = self._collectives(gathered, trained)
            # A step gathers at most one time for each action of the stage with most of them.
            actions = Counter(action.stage for line in pipeline.program.values() for action in line)
            unshard *= max(actions.values()) if job.mesh.reshard_after_forward else 1
            reduce *= pipeline.microbatches if job.reduces_each else 1
        update = costs.optimizer_s * (max(one.rest + one.experts for one in trained) / job.mesh.shards) / slowest
        # The update takes longer because of state in host memory.
        moved = max(state_of(job, stages, pipeline.cut, "cuda").host for stages in pipeline.stages_of_rank)
        reduce += self._replicated_sums()
        return unshard, reduce, update + moved * 8 / (self._host_gbps * 1e9)

    def _sharded(self, of_stage: Callable[[Job, int, Sequence[int]], tuple[int, int]]) -> list[_Sharded]:
        """Returns what the ranks of each pipeline rank share of what `of_stage` counts: all of it,
        and what belongs to experts."""
        job, cut = self._job, self._pipeline.cut
        each = ([of_stage(job, stage, cut) for stage in stages] for stages in self._pipeline.stages_of_rank)
        return [self._shared(counts) for counts in each]

    def _shared(self, counts: Sequence[tuple[int, int]]) -> _Sharded:
        mesh = self._job.mesh
        apart = sum(experts for _, experts in counts) if mesh.ep > 1 else 0
        return _Sharded(sum(count for count, _ in counts) - apart, apart, mesh.shards, mesh.ep)

    def _blocks(self, of_stage: Callable[..., tuple[int, int]], stage: int, each: int) -> tuple[float, float]:
        """Returns the seconds of a collective over a layer of a stage, and over its ends."""
        cut = self._pipeline.cut
        whole, layers = (
            self._sent(self._shared([of_stage(self._job, stage, cut, ends=ends)]), each) for ends in (True, False)
        )
        return layers / max(1, cut[stage]), whole - layers

    def _beside(self, stage: int, speed: float) -> tuple[float, float, float, float]:
        """Returns the seconds that FSDP's collectives on a GPU add to a stage: to each forward, to
        each backward, before all of them, and after. Weights that are not freed are gathered beside
        the first forward, and gradients that are summed once beside the last backward."""
        job, layer, layers, tensor = self._job, self._costs.layer, self._pipeline.cut[stage], self._tensor
        if self._costs.kind == "cpu" or job.mesh.shards == 1:
            return 0.0, 0.0, 0.0, 0.0
        alone = job.mesh.cp * job.mesh.tp * speed
        forward = layer.forward / alone + self._within + tensor.forward
        backward = layer.backward / alone + 2 * self._within + tensor.backward
        gather, ends = self._blocks(gathered_bytes, stage, 1)
        add, end_sums = self._blocks(stage_trained, stage, job.train.dtypes.reduce.bytes)
        freed, each = job.mesh.reshard_after_forward, job.reduces_each
        return (
            layers * _longer(gather * freed, forward),
            layers * _longer(gather * freed + add * each, backward),
            ends + gather + layers * _longer(gather * (not freed), forward),
            end_sums + add + layers * _longer(add * (not each), backward),
        )

    def _layer_traffic(self) -> float:
        """Returns the seconds of cp's and ep's messages in one layer's forward of one microbatch. A
        backward has twice as many. Experts: rows go to (ep - 1) / ep of the ranks and back."""
        job, model, mesh = self._job, self._job.model, self._mesh
        number, cp, tp = job.train.dtypes.compute.bytes, job.mesh.cp, job.mesh.tp
        tokens = job.train.micro_batch_size * job.data.seq_len / cp / tp
        seconds = 0.0
        if cp > 1:
            seconds += _over(self._slowest(mesh.groups("cp")), context_bytes(job) / tp)
        if job.mesh.ep > 1:
            sent = max(layer.sent for layer in sizes_of(model).kinds)
            rows = 2 * sent * model.hidden_size * (1 - 1 / job.mesh.ep)
            shards = mesh.groups(("fsdp", "cp"))
            exchanging = [group[i : i + mesh.ep] for group in shards for i in range(0, len(group), mesh.ep)]
            seconds += _over(self._slowest(exchanging), tokens * rows * number)
        return seconds

    def _tensor_traffic(self) -> _TensorTraffic:
        job, tp = self._job, self._job.mesh.tp
        if tp == 1:
            return _TensorTraffic(0.0, 0.0, 0.0)
        size = microbatch_tokens(job) * job.model.hidden_size * job.train.dtypes.compute.bytes
        one, family = _over(self._slowest(self._mesh.groups("tp")), size * (1 - 1 / tp)), counted_family(job.model)
        layers = range(job.model.num_layers)
        blocks = sum(1 if family.layer(job.model, index).routes else 2 for index in layers) / len(layers)
        extent, again = job.train.activation_checkpointing, 0.0
        if keeps_parts(job) and extent in ("none", "selective"):
            again = blocks
        elif extent != "none":  # a layer that is recomputed does not send its result again
            again = 2 * blocks - 1
        return _TensorTraffic(one, 2 * blocks * one, (2 * blocks + again) * one)

    def _replicated_sums(self) -> float:
        """Returns the seconds of summing over tp the gradients of what each rank has whole."""
        job, tp, cut = self._job, self._job.mesh.tp, self._pipeline.cut
        if tp == 1:
            return 0.0
        alone = job.model_copy(update={"mesh": job.mesh.model_copy(update={"tp": 1})})
        whole = max(
            sum(tp * stage_trained(job, stage, cut)[0] - stage_trained(alone, stage, cut)[0] for stage in stages)
            for stages in self._pipeline.stages_of_rank
        ) / (tp - 1)
        size = whole / job.mesh.shards * job.train.dtypes.gradients.bytes
        return _over(self._slowest(self._mesh.groups("tp")), 2 * (1 - 1 / tp) * size)

    def _collectives(self, gathered: Sequence[_Sharded], trained: Sequence[_Sharded]) -> tuple[float, float]:
        """Returns the seconds of gathering weights once, and of summing gradients over shards, for
        the slowest pipeline rank: from bytes of weights and numbers of gradients."""
        if self._job.mesh.shards == 1:
            return 0.0, 0.0
        number = self._job.train.dtypes.reduce.bytes
        return max(self._sent(one, 1) for one in gathered), max(self._sent(one, number) for one in trained)

    def _sent(self, one: _Sharded, each: int) -> float:
        """Returns the seconds of a collective of `each` bytes per number over the shards."""
        experts = _over(self._experts_ring, each * one.experts_sent) if one.experts_sent else 0.0
        return _over(self._ring, each * one.rest_sent) + experts

    def _slowest(self, groups: Sequence[Sequence[int]]) -> Link | None:
        """Returns the slowest link of rings through these groups; None if none takes any time.
        Groups that leave a node together share its cable."""
        leaving = Counter[str]()
        pairs: dict[tuple[str, str], None] = {}  # in the order of the rings
        for group in groups:
            names = [self._seats[rank].name for rank in group]
            different = set(names)
            if len(different) > 1:
                leaving.update(different)
            pairs.update(dict.fromkeys(zip(names, [*names[1:], names[0]], strict=True)))
        slowest: Link | None = None
        for a, b in pairs:
            link = self._machines.between(a, b)
            if link is None:
                continue
            rate = link.gbps / (max(leaving[a] or 1, leaving[b] or 1) if a != b else 1)
            if slowest is None or rate < slowest.gbps:
                slowest = Link(rate, link.latency_s)
        return slowest

    def _link_uses(
        self, simulator: Simulator, times: StageTimes, timeline: Timeline, step_s: float
    ) -> tuple[list[LinkUse], int]:
        """Returns the use of the cables that pipelines cross in a step, and the number of these
        cables. The busiest come first; at most `_MOST_LISTED` are returned."""
        borders = self._borders
        messages: dict[frozenset[str], int] = {}  # in either direction: gradients are as large
        crossed: dict[frozenset[str], list[int]] = {}
        for stage, border in enumerate(borders):
            for nodes, count in border.crossings.items():
                pair = frozenset(nodes)
                messages[pair] = messages.get(pair, 0) + count
                if crossed.setdefault(pair, [stage])[-1] != stage:
                    crossed[pair].append(stage)
        links = {pair: link for pair in messages if (link := self._machines.between(*pair)) is not None}
        carried = {pair: messages[pair] * self._pipeline.microbatches * self._size for pair in links}
        busy = {pair: carried[pair] * 8 / (link.gbps * 1e9) / step_s for pair, link in links.items()}
        on_card: dict[str, float] = {}
        for pair, share in busy.items():
            for node in pair:
                on_card[node] = on_card.get(node, 0.0) + share
        uses = []
        for pair in nsmallest(_MOST_LISTED, busy, key=lambda pair: -max(on_card[node] for node in pair)):
            own = crossed[pair]
            gained = 0.0
            if len(messages) <= _MOST_LINKS:
                without = [0.0 if s in own else border.seconds for s, border in enumerate(borders)]
                gained = max(0.0, timeline.makespan - simulator.run(replace(times, link=without)).makespan)
            one, other = sorted(pair)
            message = max(borders[s].seconds for s in own)
            most = max(on_card[node] for node in pair)
            uses.append(LinkUse((one, other), links[pair].gbps, carried[pair], message, most, gained))
        return uses, len(busy)


def _longer(collective: float, compute: float) -> float:
    """Returns the seconds by which a collective beside compute lengthens it."""
    return max(0.0, collective - compute) + _TAKEN * min(collective, compute)


def _over(link: Link | None, count: float) -> float:
    return link.latency_s + count * 8 / (link.gbps * 1e9) if link else 0.0


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
