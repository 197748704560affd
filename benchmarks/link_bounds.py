"""What `link_hiding --hosts 4` can reach at most, on paper, as a Markdown table.

`--on-paper` prints it. One pipeline rank and one card per host. The step is simulated with the
messages sharing the cards, for every depth of the warm-up. The bound holds for any order of
computing and sending: the host that computes longest, and the card that carries most, can begin
only when the first microbatch has reached them, and when they are done, the last gradient has yet
to reach the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.paced import HEAD
from benchmarks.torch_1f1b_on_paper import torch_1f1b_s
from raypp.planning.choose_lookahead import best_depth, cards_of_nodes, depths
from raypp.schedules.one_f_one_b import build
from raypp.schedules.simulate import Simulator, StageTimes

SHARES = (0.5, 1.0, 1.5, 2.0)
OWN_CUT = [2, 3, 2, 1]
"""How raypp cuts this model into four."""
INT8 = (256 + 4) / (256 * 4)
"""Size of an int8 message with rows of 256 numbers, relative to fp32."""


def stage_times(layers: Sequence[int], head: float = HEAD) -> StageTimes:
    """Returns the times of 1F1B's stages in units of the mean forward; a backward takes two.

    Args:
        layers: Of each stage.
        head: Layers that the last stage's head and loss take as long as.
    """
    weights = [*layers[:-1], layers[-1] + head]
    forward = [weight * len(weights) / sum(weights) for weight in weights]
    hosts = list(range(len(layers)))
    return StageTimes(forward, [2 * time for time in forward], cards=cards_of_nodes(hosts, hosts))


def bound_s(times: StageTimes, microbatches: int) -> float:
    """Returns a time that no schedule with one stage per host and whole backwards can go below."""
    last, link = len(times.forward) - 1, times.message(0)
    bounds = []
    for rank, (forward, backward) in enumerate(zip(times.forward, times.backward, strict=True)):
        reached = sum(times.forward[:rank]) + rank * link  # the earliest begin of its first forward
        rest = sum(times.backward[:rank]) + rank * link  # what follows its last backward
        bounds.append(reached + microbatches * (forward + backward) + rest)
        if 0 < rank < last:
            carried = 2 * microbatches * link
            bounds.append(reached + forward + carried + rest - link)  # what leaves its card
            bounds.append(reached - link + carried + backward + rest)  # what arrives
    return max(bounds)


def rows(layers: Sequence[int], head: float, microbatches: int, theirs: Sequence[int]) -> list[str]:
    """Returns the table's rows for one cut, compared with torch's schedule on the cut `theirs`."""
    times, pp, other = stage_times(layers, head), len(layers), stage_times(theirs, head)
    free = Simulator(build(pp, 1, microbatches)).run(times).makespan
    found = []
    for share in SHARES:
        for name, size in (("fp32", 1.0), ("int8", INT8)):
            here = replace(times, link=share * size)
            tried = depths(lambda depth: Simulator(build(pp, 1, microbatches, depth)), microbatches, here)
            best = best_depth(tried)
            apart = Simulator(build(pp, 1, microbatches, best.lookahead)).run(replace(here, cards=None)).makespan
            against = [
                torch_1f1b_s(other.forward, other.backward, microbatches, share, both_ways=both_ways) / best.step_s
                for both_ways in (True, False)
                if size == 1.0
            ]
            steps = " / ".join(f"{free / depth.step_s:.2f}" for depth in tried)
            found.append(f"| {share} | {name} | {free / best.step_s:.2f} | {best.lookahead} | {steps} "
                         f"| {free / apart:.2f} | {free / bound_s(here, microbatches):.2f} "
                         f"| {' / '.join(f'{ratio:.2f}' for ratio in against)} |")  # fmt: skip
    return found


def print_bounds(layers: Sequence[int], microbatches: int) -> None:
    """Prints the tables for stages that are alike, this cut with a head, and raypp's own."""
    assert all(one == other for one, other in pairwise(layers)), "without the head, the stages are alike"
    for cut, head, name in (
        (layers, 0.0, "equal stages"),
        (layers, HEAD, f"layers {layers}, a head of {HEAD} layers"),
        (OWN_CUT, HEAD, f"layers {OWN_CUT} (raypp's own cut; torch's as before), a head of {HEAD} layers"),
    ):
        print(f"\nP = {len(layers)}, m = {microbatches}, {name}, one card per host: share of a free link's speed")
        print("\n| message ÷ forward | format | best | lookahead | by lookahead, from 0 | a card per channel | bound "
              "| torch ÷ best, links both ways / as gloo's |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(rows(cut, head, microbatches, layers)))
