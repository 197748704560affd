"""Tests the nodes of a run with each other, by the processes that are between two attempts."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypp.control.group_test import GROUP_TIMEOUT_S, slowest
from raypp.control.ray_nodes import all_nodes
from raypp.control.recovery.node_pairs import failing_nodes, ring_rounds
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
