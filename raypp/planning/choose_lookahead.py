"""Chooses how many extra warm-up forwards hide the links, and which ranks share a network card."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raypp.errors import JobError
from raypp.planning.schedules.simulate import Simulator, StageTimes, Timeline

WORTH = 0.01
"""A deeper warm-up must shorten a step by this fraction: its memory is certain, its gain is only
predicted."""

_PATIENCE = 3
"""Stop after this many deeper programs in a row without a gain."""

_MOST_SIMULATED = 300_000
"""Actions of all programs together beyond which no deeper one is tried: a simulation takes time."""

_DRAWS = 6
"""Simulations of a program whose actions vary, each with other times."""
_BY_EVENTS = 5
"""How much longer a simulation takes that follows events: with shared cards, or varying times."""


@dataclass(frozen=True)
class Depth:
    """One depth of the warm-up. `lookahead`: extra forwards per rank below. `step_s`: simulated
    time of the program; a mean over several if the times vary."""

    lookahead: int
    step_s: float
    simulator: Simulator = field(repr=False)
    timeline: Timeline = field(repr=False)


def depths(
    simulator: Callable[[int], Simulator],
    microbatches: int,
    times: StageTimes,
    most_in_flight: Sequence[int] | None = None,
    fits: Callable[[int, Simulator], bool] | None = None,
) -> list[Depth]:
    """Returns the depths, from 0, that change the program, fit into memory, and may bring a gain.

    Of a program with very many actions, only the first few.

    Args:
        simulator: Returns the simulator of the program with a depth, or raises JobError
            (`ResolvedPipeline.simulator`).
        most_in_flight: Microbatches in flight that each stage has memory for, where that was
            measured; None: any number.
        fits: Whether a depth and its program fit into memory by plan; None: any does. Depth 0 is
            always included, because it is what the job would do anyway.
    """
    choices: list[Depth] = []
    repeats = _DRAWS * _BY_EVENTS if times.spread or times.link_spread else _BY_EVENTS if times.cards else 1
    for lookahead in range(microbatches):
        before = choices[-1].simulator if choices else None
        if before is not None and (lookahead + 1) * before.actions * repeats > _MOST_SIMULATED:
            break
        try:
            one = simulator(lookahead)
        except JobError:
            break
        if before is not None and one.program == before.program:
            break
        if choices and fits is not None and not fits(lookahead, one):
            break
        timeline = one.run(times)
        limits = most_in_flight if choices and most_in_flight is not None else timeline.in_flight
        if any(n > m for n, m in zip(timeline.in_flight, limits, strict=True)):
            break
        step_s = statistics.mean(one.run_varied(times, _DRAWS))
        choices.append(Depth(lookahead, step_s, one, timeline))
        if len(choices) > _PATIENCE and choices[-1].step_s >= choices[-1 - _PATIENCE].step_s * (1 - WORTH / 10):
            break
    return choices


def best_depth(depths: Sequence[Depth]) -> Depth:
    """Returns the shallowest depth whose step is at most `WORTH` longer than the shortest one."""
    shortest = min(depth.step_s for depth in depths)
    return next(depth for depth in depths if depth.step_s <= shortest * (1 + WORTH))


_SHARED = 0.7
"""Of the time that the messages of a node's channels need one after the other: if all of them at
once need this much, they share a card. Two channels that share nothing need half of it, more
channels need less."""


def cards_of_nodes(rank_of_stage: Sequence[int], nodes: Sequence[int]) -> list[int | None] | None:
    """Returns the card of every pipeline rank if each node has one card; None if none is shared.
    The result is `StageTimes.cards`. `nodes`: the node of every pipeline rank."""
    channels = {frozenset(pair) for pair in pairwise(rank_of_stage)}
    # How many leave each node. As many arrive.
    loads = Counter(nodes[one] for pair in channels if len({nodes[one] for one in pair}) > 1 for one in pair)
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
    that much longer. `wire`: seconds of a message alone, by border; the border after the last stage
    is not used. `crowded`: the same while all channels are in use.
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
