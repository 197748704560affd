"""Layers to stages: cuts whose stages cost about the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypp.errors import JobError, Problem

_Combine = Callable[[int, int, int, float], float]
_NEVER = float("inf")
_SAME_COST = 1e-9
"""Relative difference below which two costs are the same: sums of floats differ by their order."""


def cut_layers(num_layers: int, num_stages: int, input_weight: float = 1.0, output_weight: float = 1.0) -> list[int]:
    """Layers of each stage, so that stages cost about the same.

    The embedding counts as `input_weight` layers on the first stage, the final norm, projection and loss as
    `output_weight` on the last. With whole weights the sum is dealt out evenly, the earlier stages taking what is left
    over; with fractions, the cut whose costliest stage is cheapest is taken (`balance`).

    Args:
        num_layers: Decoder layers, at least 1.
        num_stages: Stages of the whole pipeline, at least 1.
        input_weight: What the embedding costs, in layers.
        output_weight: What norm, projection and loss cost, in layers.

    Raises:
        JobError: A stage would have no layer; the fix names the largest number of stages that works.
    """
    cut = _cut(num_layers, num_stages, input_weight, output_weight)
    if min(cut) < 1:
        raise JobError(no_layer(num_layers, num_stages, input_weight, output_weight))
    return cut


def most_stages(num_layers: int, input_weight: float = 1.0, output_weight: float = 1.0) -> int:
    """The largest number of stages that `cut_layers` can fill; 1 when only the whole model works."""
    works = (s for s in range(num_layers, 1, -1) if min(_cut(num_layers, s, input_weight, output_weight)) > 0)
    return next(works, 1)


def no_layer(
    num_layers: int, num_stages: int, input_weight: float, output_weight: float, stages_per_rank: int = 1
) -> Problem:
    """The problem of a stage without a layer, with the largest mesh.pp that works.

    Args:
        stages_per_rank: For the fix: mesh.pp is the number of stages divided by it.
    """
    cut = _cut(num_layers, num_stages, input_weight, output_weight)
    stage = next((index for index, count in enumerate(cut) if count < 1), num_layers)
    most = most_stages(num_layers, input_weight, output_weight)
    each = f" with {stages_per_rank} stages per rank" if stages_per_rank > 1 else ""
    fits = most // stages_per_rank
    ways = [f"use mesh.pp ≤ {fits}{each}" if fits else f"use pipeline.stages_per_rank ≤ {most}"]
    if num_stages <= num_layers:
        ways.append(f"lower pipeline.input_weight/output_weight (now {input_weight:g}/{output_weight:g})")
    return Problem(
        "mesh.pp",
        f"{num_stages} stages for {num_layers} layers leave stage {stage} without a layer",
        ", or ".join(ways),
    )


def balance(
    costs: Sequence[float], num_stages: int, input_weight: float = 0.0, output_weight: float = 0.0
) -> list[int]:
    """The contiguous cut whose costliest stage is cheapest; every stage gets at least one layer.

    Among those, the one with the smallest sum of squared stage costs (the rest is even, too); among those, the one
    with more layers on the earlier stages.

    Args:
        costs: What each layer costs, in any unit.
        num_stages: Stages to cut into.
        input_weight: Cost added to the first stage, in the same unit.
        output_weight: Cost added to the last stage.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    total = len(costs)
    if not 1 <= num_stages <= total:
        raise ValueError(f"{total} layers cannot fill {num_stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def stage_cost(stage: int, start: int, end: int) -> float:
        extra = (input_weight if stage == 0 else 0.0) + (output_weight if stage == num_stages - 1 else 0.0)
        return sums[end] - sums[start] + extra

    largest = _suffixes(total, num_stages, lambda s, a, b, rest: max(stage_cost(s, a, b), rest))[0][0]
    limit = largest * (1 + _SAME_COST)

    def squares(stage: int, start: int, end: int, rest: float) -> float:
        cost = stage_cost(stage, start, end)
        return cost * cost + rest if cost <= limit else _NEVER

    best = _suffixes(total, num_stages, squares)
    cut, start = [], 0
    for stage in range(num_stages):
        wanted = best[stage][start] * (1 + _SAME_COST)
        ends = range(total, start, -1)
        end = next(e for e in ends if squares(stage, start, e, best[stage + 1][e]) <= wanted)
        cut.append(end - start)
        start = end
    return cut


def balance_ranks(
    num_layers: int, placement: Sequence[Sequence[int]], input_weight: float = 0.0, output_weight: float = 0.0
) -> list[int]:
    """The cut whose costliest *rank* is cheapest, for placements that put unequal stages together, as a V does.

    Layers are dealt one by one to the rank that has least so far, then those of a rank in the same way to its stages;
    at equal cost the earlier one takes it. With layers that all cost the same no other cut has a cheaper costliest
    rank, nor a smaller sum of squares.

    Args:
        num_layers: Decoder layers.
        placement: Stages of every rank; as many on each.
        input_weight: What the embedding costs, in layers.
        output_weight: What norm, projection and loss cost, in layers.

    Returns:
        Layers of every stage, at least one each.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    num_stages = sum(map(len, placement))
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages")
    extra = [0.0] * num_stages
    extra[0] += input_weight
    extra[-1] += output_weight
    ranks = _deal_out(num_layers, [sum(extra[s] for s in held) for held in placement], least=len(placement[0]))
    cut = [0] * num_stages
    for held, layers in zip(placement, ranks, strict=True):
        for stage, count in zip(held, _deal_out(layers, [extra[s] for s in held], least=1), strict=True):
            cut[stage] = count
    return cut


def _deal_out(layers: int, extra: Sequence[float], least: int) -> list[int]:
    """Layers to places that each have a cost already, `least` to each, then one by one to the cheapest."""
    found = [least] * len(extra)
    for _ in range(layers - least * len(extra)):
        found[min(range(len(extra)), key=lambda i: (round(found[i] + extra[i], 9), i))] += 1
    return found


def _suffixes(total: int, num_stages: int, combine: _Combine) -> list[list[float]]:
    """best[s][i]: the smallest value of stages s.. holding layers i.., where `combine` adds a stage to the rest."""
    best = [[_NEVER] * (total + 1) for _ in range(num_stages + 1)]
    best[num_stages][total] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        following = best[stage + 1]
        for start in range(total):
            ends = (end for end in range(start + 1, total + 1) if following[end] < _NEVER)
            best[stage][start] = min((combine(stage, start, end, following[end]) for end in ends), default=_NEVER)
    return best


def _cut(num_layers: int, num_stages: int, first: float, last: float) -> list[int]:
    if float(first).is_integer() and float(last).is_integer():
        return _deal(num_layers, num_stages, int(first), int(last))
    if num_stages > num_layers:
        return [1] * num_layers + [0] * (num_stages - num_layers)
    return balance([1.0] * num_layers, num_stages, first, last)


def _deal(num_layers: int, num_stages: int, first: int, last: int) -> list[int]:
    each, rest = divmod(num_layers + first + last, num_stages)
    cut = [each + (stage < rest) for stage in range(num_stages)]
    cut[0] -= first
    cut[-1] -= last
    return cut
