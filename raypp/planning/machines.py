"""The nodes that a job may run on and their links: given, or measured by `raypp doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NotRequired

from annotated_types import Ge, Le, MaxLen
from typing_extensions import TypedDict

from raypp.errors import JobError, ResourcesError
from raypp.job.job import Job
from raypp.planning.decision import ResolvedPipeline
from raypp.planning.geometry import Mesh
from raypp.planning.resolve import wire_bytes, wire_of
from raypp.planning.seating import arrange, keep_groups_inside
from raypp.untrusted.documents import Bounds, Count, parse_as
from raypp.untrusted.files import read_file
from raypp.untrusted.text import visible

INSIDE_GBPS = 100.0
"""Rate between two devices of one node if nothing else is known: PCIe, or a CPU's memory. That of
each kind of device is in `planning.costs`."""


_BOUNDS = Bounds(size=16 << 20)
_Name = Annotated[str, MaxLen(256)]
_Ratio = Annotated[float, Ge(0), Le(1e6)]
_Rate = Annotated[float, Ge(0), Le(1e9)]


class _Host(TypedDict):
    node: _Name


class _Device(TypedDict):
    node: _Name
    flops_rel: NotRequired[_Ratio | None]


_Link = TypedDict("_Link", {"from": _Name, "to": _Name, "gbps": _Rate, "latency_ms": NotRequired[_Rate]})


class _File(TypedDict):
    nodes: list[_Name | _Host]
    devices: NotRequired[list[_Device]]
    links: NotRequired[list[_Link]]
    memory: NotRequired[dict[_Name, Count]]
    measured: NotRequired[_Name]


@dataclass(frozen=True)
class Node:
    """One machine. `devices`: number of ranks it can take. `speed`: of its devices, relative to the
    one whose costs are known. `memory`: bytes of host memory that is free; 0: unknown."""

    name: str
    devices: int
    speed: float = 1.0
    memory: int = 0


@dataclass(frozen=True)
class Link:
    """The connection between two nodes, per direction. `gbps`: Gbit/s. `latency_s`: seconds before
    the first byte arrives."""

    gbps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Machines:
    """Nodes and the links between them.

    Attributes:
        nodes: In the order of their addresses, which is the order in which pipelines run through
            them.
        link: Link between any two nodes that `links` does not contain, which all devices of a node
            share; None: links are free.
        links: By the names of the two nodes, in either order; by one name: between two devices of a
            node.
        inside_gbps: Rate between two devices of any other node.
        measured: True if the links were measured.
        source: Where the numbers come from, for people.
    """

    nodes: tuple[Node, ...]
    link: Link | None = None
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    inside_gbps: float = INSIDE_GBPS
    measured: bool = False
    source: str = ""

    @classmethod
    @lru_cache(maxsize=4)
    def alike(
        cls, world: int, per_node: int, gbps: float | None, latency_s: float = 0.0, inside_gbps: float = INSIDE_GBPS
    ) -> Machines:
        """Returns enough equal nodes for `world` ranks, with the same rate between all of them."""
        count, used = -(-world // per_node), min(world, per_node)
        nodes = tuple(Node(f"node {index}", per_node) for index in range(count))
        where = f"{count} node{'s' if count > 1 else ''} with {per_node} device{'s' if per_node > 1 else ''} each"
        link = Link(gbps, latency_s) if gbps else None
        shared = f", {gbps / used:,.4g} for each of {used} devices" if gbps and used > 1 else ""
        speed = f", {gbps:,g} Gbit/s per node between them{shared}" if gbps else ", free links (--link-gbps or --links)"
        return cls(nodes, link, inside_gbps=inside_gbps, source=f"{where}{speed if count > 1 else ''}")

    @property
    def devices(self) -> int:
        return sum(node.devices for node in self.nodes)

    @property
    def free_memory(self) -> dict[str, int]:
        """Free bytes of host memory by node; 0 if unknown."""
        return {node.name: node.memory for node in self.nodes}

    def times(self, factor: int) -> Machines:
        """Returns `factor` times as many nodes; new ones have the slowest link there is."""
        links = [link for pair, link in self.links.items() if len(pair) == 2]
        links += [self.link] if self.link else []
        slowest = min(links, key=lambda one: one.gbps, default=None)
        more = tuple(
            replace(node, name=f"{node.name}, copy {copy}") for copy in range(1, factor) for node in self.nodes
        )
        return replace(self, nodes=(*self.nodes, *more), link=slowest)

    def between(self, one: str, other: str) -> Link | None:
        """Returns the link between two nodes, or the one inside a node. None: the link is free."""
        if one == other:
            return self.links.get(frozenset((one,)), Link(self.inside_gbps))
        return self.links.get(frozenset((one, other)), self.link) if self.links else self.link

    def seats(self, mesh: Mesh, *, apart: bool = False) -> Sequence[Node]:
        """Returns the node of every rank, by raypp's seating order. If replicas train apart, all
        nodes count as one site. Raises ResourcesError: there are more ranks than devices, or a tp
        group would leave its node."""
        if mesh.world > self.devices:
            fault = f"{mesh.world} ranks do not fit on {self.devices} device{'s' if self.devices > 1 else ''}"
            raise ResourcesError(fault, "use a smaller mesh, or add nodes")
        return _seats(self.nodes, mesh, apart)


@lru_cache(maxsize=1)  # a plan asks several times
def _seats(nodes: Sequence[Node], mesh: Mesh, apart: bool) -> Sequence[Node]:
    tp = mesh.sizes.tp
    if tp > 1:
        keep_groups_inside(mesh, [(node.name, node.devices) for node in nodes])
    homes: list[Node] = []
    positions: list[range] = []
    for node in nodes:
        if len(homes) == mesh.world:
            break
        devices = min(node.devices // tp * tp, mesh.world - len(homes))
        positions.append(range(len(homes), len(homes) + devices))
        homes += [node] * devices
    return [homes[position] for position in arrange(mesh, positions, [positions] if apart else ())]


def read_machines(path: Path) -> Machines:
    """Reads the file that `raypp doctor --out` wrote.

    The file is one JSON object: `nodes` (names), `devices` (one entry per device: `node`, `kind`,
    optional `flops_rel`), `links` (`from`, `to`, `gbps`, `latency_ms`; between two devices of a
    node if both names are the same), `measured` (when), optional `memory` (free bytes by node). If
    a pair was measured in both directions, the slower one counts.

    Raises:
        JobError: The file cannot be read, or `links` names a node that `nodes` does not contain.
    """
    fix = "write it with: raypp doctor --out FILE"
    document = parse_as(
        _File, read_file(path, _BOUNDS.size, JobError, fix=fix), str(path), _BOUNDS, JobError, fix, unknown="ignore"
    )
    names = [node if isinstance(node, str) else node["node"] for node in document["nodes"]]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise JobError(f"{path} names {visible(twice)!r} twice in nodes", fix)
    speeds: dict[str, list[float]] = {}
    for device in document.get("devices", []):
        speeds.setdefault(device["node"], []).append(device.get("flops_rel") or 1.0)
    memory = document.get("memory", {})
    nodes = tuple(
        Node(name, max(1, len(own)), min(own, default=1.0), memory.get(name, 0))
        for name, own in ((name, speeds.get(name, [])) for name in names)
    )
    links: dict[frozenset[str], Link] = {}
    for entry in document.get("links", []):
        pair = frozenset((entry["from"], entry["to"]))
        link = Link(entry["gbps"], entry.get("latency_ms", 0.0) / 1e3)
        links[pair] = min(link, links.get(pair, link), key=lambda one: one.gbps)
    unknown = sorted({name for pair in links for name in pair} - set(names))
    if not nodes or unknown:
        fault = f"names {visible(unknown[0])!r} in links, but not in nodes" if unknown else "has no nodes"
        raise JobError(f"{path} {fault}", fix)
    slow = [pair for pair, link in links.items() if link.gbps <= 0]
    if slow:
        raise JobError(f"{path}: the link between {visible(' and '.join(sorted(slow[0])))} has no rate", fix)
    source = f"links measured {visible(document.get('measured', ''))} ({path})".replace("  ", " ")
    return Machines(nodes, links=links, measured=True, source=source)


@dataclass(frozen=True)
class Boundary:
    """The boundary between two neighbouring stages.

    Attributes:
        stage: The stage before the boundary; the other one is `stage + 1`.
        crosses_ranks: False if one rank holds both stages, so that nothing is sent.
        bytes_per_microbatch: Bytes of an activation. The gradient that comes back has the same
            size.
        bytes_per_step: Bytes of both directions and all microbatches of one pipeline.
    """

    stage: int
    from_rank: int
    to_rank: int
    crosses_ranks: bool
    bytes_per_microbatch: int
    bytes_per_step: int


def message_bytes(job: Job) -> int:
    """Returns the bytes of the larger message between two ranks, activations or gradients. A
    message has micro_batch_size · seq_len · hidden_size values, divided over cp · tp ranks. Rows
    are assumed to be data.seq_len long; negotiated lengths are shorter."""
    wire = wire_of(job)
    return max(wire_bytes(job, wire.activations), wire_bytes(job, wire.gradients))


def boundaries(job: Job, pipeline: ResolvedPipeline) -> list[Boundary]:
    """All borders of a pipeline, from the first stage to the last."""
    crossings = []
    for stage, (upper, lower) in enumerate(pairwise(pipeline.rank_of_stage)):
        size = message_bytes(job) if upper != lower else 0
        crossings.append(Boundary(stage, upper, lower, upper != lower, size, 2 * size * pipeline.microbatches))
    return crossings
