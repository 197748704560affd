"""Which pipeline ranks share a network card: by the nodes they are on, or as messages show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_SHARED = 1.4
"""A message that takes this many times as long while all channels are in use shares a card. Without
sharing it takes as long as alone, with one other on the card twice as long."""


def cards_of_nodes(rank_of_stage: Sequence[int], nodes: Sequence[int]) -> list[int | None] | None:
    """Returns the card of every pipeline rank if each node has one card; None if none is shared.

    The result is `StageTimes.cards`.

    Args:
        rank_of_stage: Pipeline rank of every stage.
        nodes: The node of every pipeline rank.
    """
    loads = _loads(rank_of_stage, nodes)
    return list(nodes) if any(load > 1 for load in loads.values()) else None


def cards_and_links(
    rank_of_stage: Sequence[int], nodes: Sequence[int], wire: Sequence[float], crowded: Sequence[float]
) -> tuple[list[int | None] | None, list[float]]:
    """Returns the card of every pipeline rank and the time of a message across every border.

    They are `StageTimes.cards` and `StageTimes.link`, as messages show them. A node's channels to
    other nodes share its card if all of them were slower among others. If they were not, the node
    has a card for each neighbour. A card that carries several messages may carry less in total than
    with one; then the time of a message is its part of the total.

    Args:
        rank_of_stage: Pipeline rank of every stage.
        nodes: The node of every pipeline rank.
        wire: Seconds of a message alone, by border; the border after the last stage is not used.
        crowded: The same while all channels are in use.
    """
    loads, touched = _loads(rank_of_stage, nodes), _borders(rank_of_stage, nodes)
    shared = {
        node: loads[node]
        for node in set(nodes)
        if loads[node] > 1 and all(crowded[border] >= _SHARED * wire[border] for border in touched[node])
    }
    links = []
    for border in range(len(rank_of_stage) - 1):
        ends = nodes[rank_of_stage[border]], nodes[rank_of_stage[border + 1]]
        together = max((shared.get(node, 0) for node in ends), default=0) if ends[0] != ends[1] else 0
        links.append(max(wire[border], crowded[border] / together) if together else wire[border])
    return [node if node in shared else None for node in nodes] if shared else None, links


def _loads(rank_of_stage: Sequence[int], nodes: Sequence[int]) -> Counter[int]:
    """Returns how many channels leave each node. As many arrive."""
    pairs = {(rank_of_stage[border], rank_of_stage[border + 1]) for border in range(len(rank_of_stage) - 1)}
    channels = {channel for one, other in pairs for channel in ((one, other), (other, one))}
    return Counter(nodes[source] for source, to in channels if nodes[source] != nodes[to])


def _borders(rank_of_stage: Sequence[int], nodes: Sequence[int]) -> dict[int, list[int]]:
    """Returns the borders that messages to and from other nodes cross, by node."""
    found: dict[int, list[int]] = {}
    for border in range(len(rank_of_stage) - 1):
        ends = nodes[rank_of_stage[border]], nodes[rank_of_stage[border + 1]]
        for node in set(ends) if ends[0] != ends[1] else ():
            found.setdefault(node, []).append(border)
    return found
