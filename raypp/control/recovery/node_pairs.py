"""Which nodes to test with which after a hang that no rank explains, and which of them fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
