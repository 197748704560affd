"""The traffic of a step between and within stages, and the time it takes on the links.

Messages that cross the same boundary over the same node's cable take turns: if `n` pipelines cross
from one node to another at the same place, each gets an `n`-th of the cable's rate. Messages of one
pipeline that cross different boundaries share a node's cable only while both are on their way
(`schedules.shared_cards`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from raypp.mesh.geometry import Mesh, of_pipeline_rank
from raypp.planning.end_weights import activation_bytes, sum_bytes
from raypp.planning.machines import Link, Machines, Node
from raypp.planning.sizes import sizes_of
from raypp.schedules.action import Program
from raypp.schedules.simulate import Simulator, StageTimes, Timeline
from raypp.spec.job import Job

MOST_LISTED = 1024
"""Most cables in a forecast: those of large meshes are alike."""
MOST_ON_CARDS = 4096
"""Actions of a program beyond which messages of different boundaries are taken to share no card: a
simulation that knows about cards takes several times as long."""
_MOST_LINKS = 16
"""With more cables than this, the gain from each one is not simulated."""


@dataclass(frozen=True)
class LinkUse:
    """Use of the cable between two nodes, in its busier direction.

    Attributes:
        nodes: The two nodes.
        gbps: Its rate.
        bytes_per_step: Activations or gradients of all pipelines that cross here.
        message_s: Seconds per message, including the share of others on the cable.
        busy: Fraction of the step in which the busier of the two nodes' cards is in use, in one
            direction, by this link or others.
        exposed_s: Seconds by which a step would be shorter if the cable were free.
    """

    nodes: tuple[str, str]
    gbps: float
    bytes_per_step: int
    message_s: float
    busy: float
    exposed_s: float


@dataclass(frozen=True)
class Border:
    """The boundary between stages `s` and `s + 1` of all pipelines.

    `crossings` counts the concurrent messages between two nodes.
    """

    crossings: Mapping[tuple[str, str], int]
    seconds: float


def border_between(mesh: Mesh, seats: Sequence[Node], machines: Machines, upper: int, lower: int, size: int) -> Border:
    """Returns the boundary with the time of its slowest message if all pipelines send at once."""
    if upper == lower:
        return Border({}, 0.0)
    senders, receivers = of_pipeline_rank(mesh, seats, upper), of_pipeline_rank(mesh, seats, lower)
    pairs = Counter((a.name, b.name) for a, b in zip(senders, receivers, strict=True))
    leaving: dict[str, int] = {}
    arriving: dict[str, int] = {}
    crossings: dict[tuple[str, str], int] = {}
    for (a, b), count in pairs.items():
        if a != b:
            leaving[a], arriving[b] = leaving.get(a, 0) + count, arriving.get(b, 0) + count
            crossings[a, b] = count
    seconds = 0.0
    for a, b in pairs:
        link = machines.between(a, b)
        if link is not None:
            share = max(leaving.get(a, 1), arriving.get(b, 1)) if a != b else 1
            seconds = max(seconds, link.latency_s + share * size * 8 / (link.gbps * 1e9))
    return Border(crossings, seconds)


def nodes_of_pipeline(mesh: Mesh, seats: Sequence[Node]) -> list[int]:
    """Returns the node of every rank of the first pipeline, as a number; others are placed
    alike."""
    names = [of_pipeline_rank(mesh, seats, rank)[0].name for rank in range(mesh.sizes.pp)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def layer_traffic(job: Job, machines: Machines, mesh: Mesh, seats: Sequence[Node]) -> float:
    """Returns the seconds of cp's and ep's messages in one layer's forward of one microbatch.

    A backward has twice as many.

    Ring: keys and values circulate, (cp - 1) / cp of them past every rank. Ulysses: queries, keys,
    values and the result are exchanged. Experts: the rows of tokens go out and come back, to (ep -
    1) / ep of the ranks.
    """
    model, number = job.model, activation_bytes(job)
    tokens = job.train.micro_batch_size * job.data.seq_len / job.mesh.cp
    seconds = 0.0
    if job.mesh.cp > 1:
        keys, queries = 2 * model.kv_heads * model.dim_per_head, model.num_heads * model.dim_per_head
        moved = (
            keys * (job.mesh.cp - 1) if job.mesh.cp_style == "ring" else (2 * queries + keys) * (1 - 1 / job.mesh.cp)
        )
        seconds += _over(_slowest(machines, seats, mesh.groups("cp")), tokens * moved * number)
    if job.mesh.ep > 1:
        sent = max(layer.sent for layer in sizes_of(model).kinds)
        rows = 2 * sent * model.hidden_size * (1 - 1 / job.mesh.ep)
        shards = mesh.groups(("fsdp", "cp"))
        exchanging = [group[i : i + mesh.ep] for group in shards for i in range(0, len(group), mesh.ep)]
        seconds += _over(_slowest(machines, seats, exchanging), tokens * rows * number)
    return seconds


@dataclass(frozen=True)
class Sharded:
    """Bytes, or numbers, of a pipeline rank's weights that its fsdp · cp ranks share.

    A ring over n ranks passes (n - 1) / n of the bytes through each link.

    Attributes:
        rest: Of all weights but experts that ep spreads.
        experts: Of those, on all ep ranks together. FSDP shards an ep-th over every ep-th rank.
        shards: fsdp · cp.
        ep: mesh.ep.
    """

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


def collectives(
    job: Job,
    machines: Machines,
    mesh: Mesh,
    seats: Sequence[Node],
    gathered: Sequence[Sharded],
    trained: Sequence[Sharded],
) -> tuple[float, float]:
    """Returns the seconds of gathering weights once, and of summing gradients over shards.

    Both for the slowest pipeline rank. The sums over replicas are in `planning.replica_sum_costs`.

    The parts that ranks on CPUs send each other take as long (`parallel.late_sums`; counted at a
    network card).

    Args:
        gathered: Bytes of every pipeline rank's weights.
        trained: Numbers of its gradients.
    """
    if job.mesh.shards == 1:
        return 0.0, 0.0
    whole = mesh.groups(("fsdp", "cp"))
    link = _slowest(machines, seats, whole)
    apart = _slowest(machines, seats, [group[i :: mesh.ep] for group in whole for i in range(mesh.ep)])

    def seconds(one: Sharded, each: int) -> float:
        experts = _over(apart, each * one.experts_sent) if one.experts_sent else 0.0
        return _over(link, each * one.rest_sent) + experts

    return (
        max(seconds(one, 1) for one in gathered),
        max(seconds(one, sum_bytes(job)) for one in trained),
    )


def link_of_replicas(machines: Machines, mesh: Mesh, seats: Sequence[Node]) -> Link | None:
    """Returns the slowest link between replicas; None if none takes any time."""
    return _slowest(machines, seats, mesh.groups("dp_replicate"))


def gatherings(job: Job, program: Program) -> int:
    """Returns how often a step gathers sharded weights: at most one time for each of its actions.

    The stage with most actions counts.
    """
    if not job.mesh.reshard_after_forward:
        return 1
    return max(Counter(action.stage for line in program.values() for action in line).values())


def _slowest(machines: Machines, seats: Sequence[Node], groups: Sequence[Sequence[int]]) -> Link | None:
    """Returns the slowest link of rings through these groups.

    Groups that leave a node together share its cable.
    """
    leaving: dict[str, int] = {}
    pairs: dict[tuple[str, str], None] = {}  # in the order of the rings
    for group in groups:
        names = [seats[rank].name for rank in group]
        different = set(names)
        for name in different if len(different) > 1 else ():
            leaving[name] = leaving.get(name, 0) + 1
        pairs.update(dict.fromkeys(zip(names, [*names[1:], names[0]], strict=True)))
    slowest: Link | None = None
    for a, b in pairs:
        link = machines.between(a, b)
        if link is None:
            continue
        rate = link.gbps / (max(leaving.get(a, 1), leaving.get(b, 1)) if a != b else 1)
        if slowest is None or rate < slowest.gbps:
            slowest = Link(rate, link.latency_s)
    return slowest


def _over(link: Link | None, count: float) -> float:
    return link.latency_s + count * 8 / (link.gbps * 1e9) if link else 0.0


def link_uses(
    machines: Machines,
    borders: Sequence[Border],
    simulator: Simulator,
    times: StageTimes,
    timeline: Timeline,
    microbatches: int,
    size: int,
    step_s: float,
) -> tuple[list[LinkUse], int]:
    """Returns the use of the cables that pipelines cross in a step, and the number of these cables.

    The busiest come first; at most `MOST_LISTED` are returned.
    """
    messages: dict[frozenset[str], int] = {}  # in either direction: gradients are as large
    crossed: dict[frozenset[str], list[int]] = {}
    for stage, border in enumerate(borders):
        for nodes, count in border.crossings.items():
            pair = frozenset(nodes)
            messages[pair] = messages.get(pair, 0) + count
            if crossed.setdefault(pair, [stage])[-1] != stage:
                crossed[pair].append(stage)
    links = {pair: link for pair in messages if (link := machines.between(*pair)) is not None}
    carried = {pair: messages[pair] * microbatches * size for pair in links}
    busy = {pair: carried[pair] * 8 / (link.gbps * 1e9) / step_s for pair, link in links.items()}
    on_card: dict[str, float] = {}
    for pair, share in busy.items():
        for node in pair:
            on_card[node] = on_card.get(node, 0.0) + share
    uses = []
    for pair in nsmallest(MOST_LISTED, busy, key=lambda pair: -max(on_card[node] for node in pair)):
        own = crossed[pair]
        gained = 0.0
        if len(messages) <= _MOST_LINKS:
            without = [0.0 if s in own else border.seconds for s, border in enumerate(borders)]
            relieved = replace(times, link=without)
            gained = max(0.0, timeline.makespan - simulator.run(relieved).makespan)
        one, other = sorted(pair)
        message = max(borders[s].seconds for s in own)
        most = max(on_card[node] for node in pair)
        uses.append(LinkUse((one, other), links[pair].gbps, carried[pair], message, most, gained))
    return uses, len(busy)
