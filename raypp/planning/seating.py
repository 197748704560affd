"""Assigns ranks to workers according to their nodes, and stages to pipeline ranks."""

import ipaddress
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from raypp.errors import Problem, ResourcesError, first_of
from raypp.planning.geometry import Mesh, divisors
from raypp.records import NodeFacts

_MOST_NODES = 8
"""More nodes are not listed."""
_Block = Sequence[int]
"""Positions in the sorted list of workers that belong together."""


def seat_order(mesh: Mesh, facts: Sequence[NodeFacts], *, apart: bool = False) -> list[int]:
    """Returns the rank of each worker, in the order of `facts`, which has one entry per worker.

    The pipeline may cross nodes; groups that communicate more stay within a node where they fit.
    The ranks of a stage (dp_replicate · fsdp · cp · tp) stay on one node if it has room, else its
    fsdp · cp · tp ranks, else those of an expert group, with all that compute layers with them,
    else those of a cp group. Blocks that fit on no node are built from the remaining workers; those
    of a tp group always stay on one. Neighbouring stages end up on the same or on neighbouring
    nodes. With `apart`, each replica stays within a site where it fits. The result depends on node
    addresses and device indices, not on the order of the workers. Raises ResourcesError: the
    numbers of workers and ranks differ, or a tp group would leave its node.
    """
    if len(facts) != mesh.world:
        fix = "use a smaller mesh, or give the cluster more devices"
        raise ResourcesError(
            Problem("mesh", f"the mesh has {mesh.world} ranks, but there are {len(facts)} workers", fix)
        )
    workers = sorted(range(len(facts)), key=lambda worker: _place(facts[worker]))
    nodes: dict[str, list[int]] = {}
    for position, worker in enumerate(workers):
        nodes.setdefault(facts[worker].node_id, []).append(position)
    homes = (facts[workers[node[0]]].ip for node in nodes.values())
    keep_groups_inside(mesh, list(zip(homes, map(len, nodes.values()), strict=True)))
    ranks = [0] * len(facts)
    sites: dict[str, list[_Block]] = {}
    for node in nodes.values():
        sites.setdefault(facts[workers[node[0]]].site, []).append(node)
    for rank, position in enumerate(arrange(mesh, list(nodes.values()), list(sites.values()) if apart else ())):
        ranks[workers[position]] = rank
    return ranks


def keep_groups_inside(mesh: Mesh, devices: Sequence[tuple[str, int]]) -> None:
    """Raises ResourcesError if a tp group would leave its node. `devices`: the nodes and
    how many devices each has, together at least one for each rank."""
    tp, world = mesh.sizes.tp, mesh.world
    if _held(devices, tp) >= world:
        return
    fits = max(one for one in divisors(tp) if _held(devices, one) >= world)
    nodes = first_of([f"{name} has {count}" for name, count in devices], _MOST_NODES)
    fault = f"the {tp} ranks of a group must be on one node, but {world} ranks in such groups do not fit: {nodes}"
    raise ResourcesError(
        Problem("mesh.tp", fault, f"use mesh.tp {fits} with mesh.fsdp {mesh.sizes.fsdp * tp // fits}, or other nodes")
    )


def _held(devices: Sequence[tuple[str, int]], tp: int) -> int:
    """Returns the ranks that nodes hold in whole tp groups."""
    return sum(count // tp * tp for _, count in devices)


def arrange(mesh: Mesh, nodes: Sequence[_Block], sites: Sequence[Sequence[_Block]] = ()) -> list[int]:
    """Returns each rank's position. `nodes`: the positions on each node; together one for each
    rank. `sites`: the nodes of each site, if replicas train apart; else ()."""
    if not sites:
        return _arrange(nodes, _block_sizes(mesh))
    one = replace(mesh, sizes=replace(mesh.sizes, dp_replicate=1))
    replicas: list[list[int]] = []
    left: list[_Block] = []
    for site in sites:
        for replica in _blocks(site, [one.world, *_block_sizes(one)]):
            if len(replica) == one.world:
                replicas.append(_arrange(_by_node(replica, nodes), _block_sizes(one)))
            else:
                left += _by_node(replica, nodes)
    if left:
        replicas += [_arrange(_by_node(mixed, nodes), _block_sizes(one)) for mixed in _blocks(left, [one.world, 1])]
    stage = mesh.sizes.shards * mesh.sizes.tp
    starts = range(0, one.world, stage)
    return [position for start in starts for replica in replicas for position in replica[start : start + stage]]


def _by_node(positions: _Block, nodes: Sequence[_Block]) -> list[_Block]:
    wanted = set(positions)
    return [mine for node in nodes if (mine := [position for position in node if position in wanted])]


def _place(facts: NodeFacts) -> tuple[int, int, str, str, int, int]:
    """Returns a sort key: the address as a number (10.0.0.9 before 10.0.0.10), then the device."""
    return (*_address(facts.ip), facts.ip, facts.node_id, facts.device_index, facts.pid)


@lru_cache(maxsize=4096)
def _address(ip: str) -> tuple[int, int]:
    with suppress(ValueError):
        address = ipaddress.ip_address(ip)
        return address.version, int(address)
    return 9, 0  # host names sort after addresses


def _block_sizes(mesh: Mesh) -> list[int]:
    """Returns the sizes of groups to keep together, largest first; each divides the one before."""
    lengths = list(mesh.sizes.column)
    inner = [math.prod(lengths[slowest:]) for slowest in range(len(lengths))]
    blocks: list[int] = []
    experts = mesh.ep * mesh.sizes.tp if mesh.ep > 1 else 1
    for size in (*inner[:2], experts, *inner[2:]):
        if size > 1 and (not blocks or (size < blocks[-1] and blocks[-1] % size == 0)):
            blocks.append(size)
    return [*blocks, 1]


def _arrange(nodes: Sequence[_Block], sizes: list[int]) -> list[int]:
    """Returns all positions in rank order."""
    return [position for block in _blocks(nodes, sizes) for position in block]


def _blocks(nodes: Sequence[_Block], sizes: list[int]) -> list[_Block]:
    """Returns blocks of `sizes[0]` positions: within a node if possible, else from remainders."""
    size, *smaller = sizes
    whole: list[_Block] = []
    left: list[_Block] = []
    for node in nodes:
        fits = len(node) // size * size
        whole += [node[start : start + size] for start in range(0, fits, size)]
        if fits < len(node):
            left.append(node[fits:])
    if left:
        mixed = _arrange(left, smaller)
        whole += [mixed[start : start + size] for start in range(0, len(mixed), size)]
    return sorted(whole, key=min)


Placement = Literal["loop", "v"]


def place_stages(pp: int, num_stages: int, placement: Placement = "loop") -> list[list[int]]:
    """Returns the stages of each pipeline rank, ascending. "loop" assigns stages round-robin (4
    ranks, 8 stages: [0,4][1,5][2,6][3,7]). "v" reverses the direction at the ends, so the last
    stage is on the rank of the first (4 ranks, 8 stages: [0,7][1,6][2,5][3,4])."""
    if num_stages % pp:
        raise ValueError(f"{num_stages} stages cannot be divided evenly among {pp} ranks")
    ranks: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        turn, index = divmod(stage, pp)
        ranks[pp - 1 - index if placement == "v" and turn % 2 else index].append(stage)
    return ranks
