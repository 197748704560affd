"""Tests a run's nodes with each other, by its processes, after a hang that no rank explains."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypp.control.group_test import GROUP_TIMEOUT_S, slowest
from raypp.control.ray_state import all_nodes
from raypp.control.worker_group import WorkerGroup

_PATIENCE_S = 30.0


def examine_nodes(workers: WorkerGroup) -> tuple[dict[str, str], str]:
    """Tests each node's ranks among themselves, then pairs of nodes; waits for minutes at most.
    Returns the addresses of nodes that fail, each with the error; what was found, in words."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in all_nodes() if node["Alive"]}
    ranks: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    for bundle, member in sorted(workers.seated.items()):
        if member.node_id in address and (workers.device == "cpu" or bundle in workers.devices):
            device = "cpu" if workers.device == "cpu" else f"cuda:{workers.devices[bundle][1]}"
            ranks[address[member.node_id]].append((member.actor, device))
    inside = _errors([(node,) for node, own in ranks.items() if len(own) > 1], ranks)
    sound = [node for node in ranks if not inside.get((node,))]
    pairs = {pair: error for pairs in ring_rounds(sound) for pair, error in _errors(pairs, ranks).items()}
    failing = failing_nodes({node: error for (node,), error in inside.items()}, pairs)
    wrong = [f"{' – '.join(group)}: {error}" for group, error in (inside | pairs).items() if error]
    tested = f"tested {len(inside)} nodes by themselves and {len(pairs)} pairs of nodes after a hang without a culprit"
    return failing, f"{tested}: {'; '.join(wrong) or 'all work'}"


def _errors(groups: Sequence[tuple[str, ...]], ranks: dict[str, list[tuple[Any, str]]]) -> dict[tuple[str, ...], str]:
    """Tests groups of nodes that have none in common at the same time; returns their errors. A
    group with a process that does not answer is not in the result: a process is no node."""
    asked: dict[tuple[str, ...], list[Any]] = {}
    for group in groups:
        devices = [(node, device) for node in group for _, device in ranks[node]]
        with contextlib.suppress(RayError):
            port = ray.get(ranks[group[0]][0][0].info.remote(), timeout=_PATIENCE_S).free_port
            asked[group] = [
                ranks[node][0][0].test_group.remote(
                    [(rank, device) for rank, (home, device) in enumerate(devices) if home == node],
                    len(devices), len(group), group[0], port, next((one for one in group if one != node), node),
                )
                for node in group
            ]  # fmt: skip
    errors = {}
    for group, references in asked.items():
        with contextlib.suppress(RayError):
            answers = ray.get(references, timeout=GROUP_TIMEOUT_S + _PATIENCE_S)
            errors[group] = str(slowest(answers).get("error", ""))
    return errors


def ring_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns pairs in at most three rounds: each node with two others, in a round with one."""
    count = len(nodes)
    ring = [(nodes[index], nodes[(index + 1) % count]) for index in range(count if count > 2 else count - 1)]
    last = ring.pop() if len(ring) % 2 and len(ring) > 1 else None
    return [pairs for pairs in (ring[::2], ring[1::2], [last] if last else []) if pairs]


def failing_nodes(inside: Mapping[str, str], pairs: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    """Returns the nodes to leave out, each with the error. A node fails if its own ranks do not
    reach each other, or if no pair of it works while another pair of each of its partners does: of
    two nodes alone nobody knows which one it is. `inside`: the error among the ranks of each node
    that has several; "" if they work. `pairs`: the error of each pair; "" if it works."""
    failing = {node: f"its own ranks: {error}" for node, error in inside.items() if error}
    works = {node for pair, error in pairs.items() if not error for node in pair}
    for node in dict.fromkeys(node for pair in pairs for node in pair):
        of_node = {pair: error for pair, error in pairs.items() if node in pair}
        partners = {other for pair in of_node for other in pair} - {node}
        if node not in works and partners <= works and node not in failing:
            failing[node] = f"with {' and '.join(sorted(partners))}: {next(iter(of_node.values()))}"
    return failing
