"""Which pipeline ranks share a network card: by the nodes they are on, or as messages show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

_SHARED = 0.7
"""Of the time that the messages of a node's channels need one after the other: if all of them at
once need this much, they share a card. Two channels that share nothing need half of it, more
channels need less."""


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

    They are `StageTimes.cards` and `StageTimes.link`, as messages show them. While all channels are
    in use, a card that a node shares among its channels to other nodes needs the times of all their
    messages together. TCP does not share a card equally, so the slowest channel is what counts: it
    ends when the card is done. If it ends much earlier, the node has a card for each neighbour. If
    it ends later, the card carries less in total than with one message, and all its messages take
    that much longer.

    Args:
        rank_of_stage: Pipeline rank of every stage.
        nodes: The node of every pipeline rank.
        wire: Seconds of a message alone, by border; the border after the last stage is not used.
        crowded: The same while all channels are in use.
    """
    alone: dict[int, dict[frozenset[int], float]] = {}
    slowest: dict[int, float] = {}
    for border, pair in enumerate(pairwise(rank_of_stage)):
        ends = nodes[pair[0]], nodes[pair[1]]
        for node in ends if ends[0] != ends[1] else ():
            seconds = alone.setdefault(node, {})
            seconds[frozenset(pair)] = max(wire[border], seconds.get(frozenset(pair), 0.0))
            slowest[node] = max(crowded[border], slowest.get(node, 0.0))
    together = {node: sum(seconds.values()) for node, seconds in alone.items() if len(seconds) > 1}
    slower = {node: slowest[node] / need for node, need in together.items() if slowest[node] >= _SHARED * need > 0}
    links = []
    for seconds_alone, pair in zip(wire, pairwise(rank_of_stage), strict=False):
        ends = nodes[pair[0]], nodes[pair[1]]
        links.append(seconds_alone * max([1.0, *(slower.get(node, 1.0) for node in ends if ends[0] != ends[1])]))
    return [node if node in slower else None for node in nodes] if slower else None, links


def _loads(rank_of_stage: Sequence[int], nodes: Sequence[int]) -> Counter[int]:
    """Returns how many channels leave each node. As many arrive."""
    pairs = {frozenset(pair) for pair in pairwise(rank_of_stage)}
    return Counter(nodes[rank] for pair in pairs if len({nodes[rank] for rank in pair}) > 1 for rank in pair)
