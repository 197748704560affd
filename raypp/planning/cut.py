"""Assigns layers to stages so that the stages cost about the same."""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from raypp.errors import JobError, Problem

_Combine = Callable[[int, int, int, float], float]
_NEVER = float("inf")
_SAME_COST = 1e-9
"""Relative difference below which two costs are equal: the order of a sum changes its rounding."""

_MOST_COMPARED = 4 * 10**6
"""Stages · layers² up to which `balance` compares all cuts. Beyond it, equal layers are dealt out
one by one, which is as good: no cut has a cheaper costliest stage or a smaller sum of squares."""


def cut_layers(
    num_layers: int, num_stages: int, input_weight: float = 1.0, output_weight: float = 1.0, stages_per_rank: int = 1
) -> list[int]:
    """Returns the number of layers of each stage, so that stages cost about the same.

    The embedding counts as `input_weight` layers on the first stage; the final norm, projection and
    loss count as `output_weight` layers on the last. With integer weights, the sum is split evenly,
    and earlier stages take the remainder. With fractional weights, `balance` minimises the cost of
    the costliest stage. `stages_per_rank`: as for `no_layer`. Raises JobError: a stage would have
    no layer; the fix names the largest number of stages that works.
    """
    if num_stages <= num_layers:
        if not (float(input_weight).is_integer() and float(output_weight).is_integer()):
            return balance([1.0] * num_layers, num_stages, input_weight, output_weight)
        cut = _deal(num_layers, num_stages, int(input_weight), int(output_weight))
        if min(cut) >= 1:
            return cut
    raise JobError(no_layer(num_layers, num_stages, input_weight, output_weight, stages_per_rank))


def most_stages(num_layers: int, input_weight: float = 1.0, output_weight: float = 1.0) -> int:
    """Returns the most stages that `cut_layers` can fill; 1 if only the whole model works."""
    if not (float(input_weight).is_integer() and float(output_weight).is_integer()):
        return num_layers  # `balance` gives every stage a layer
    first, last = int(input_weight), int(output_weight)
    works = (s for s in range(num_layers, 1, -1) if _first_empty(num_layers, s, first, last) is None)
    return next(works, 1)


def no_layer(
    num_layers: int, num_stages: int, input_weight: float, output_weight: float, stages_per_rank: int = 1
) -> Problem:
    """Returns the problem of a stage without a layer, with the largest mesh.pp that works.
    `input_weight`: cost of the embedding, in layers. `output_weight`: cost of norm, projection and
    loss, in layers. `stages_per_rank`: converts stages to mesh.pp in the fix."""
    stage: int | None = num_layers
    if float(input_weight).is_integer() and float(output_weight).is_integer():
        stage = _first_empty(num_layers, num_stages, int(input_weight), int(output_weight))
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
    """Returns the contiguous cut that minimises the cost of the costliest stage.

    Every stage gets at least one layer. Ties go to the smallest sum of squared stage costs, so that
    the other stages are even, too; then to the cut with more layers on earlier stages.

    Args:
        costs: Cost of each layer, in any unit.
        input_weight: Cost added to the first stage, in the same unit.
        output_weight: Cost added to the last stage.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    total = len(costs)
    if not 1 <= num_stages <= total:
        raise ValueError(f"{total} layers cannot fill {num_stages} stages")
    if len(set(costs)) == 1 and num_stages * total * total > _MOST_COMPARED:
        extra = [0.0] * num_stages
        extra[0] += input_weight / costs[0]
        extra[-1] += output_weight / costs[0]
        return _deal_out(total, extra, least=1)
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
    """Returns the cut that minimises the cost of the costliest *rank*.

    It serves placements that combine unequal stages on a rank, such as the V. Layers go one by one
    to the rank with the lowest cost so far, then those of a rank in the same way to its stages.
    Ties go to the earlier one. All layers cost the same, so no other cut has a cheaper costliest
    rank or a smaller sum of squares. `placement`: stages of every rank, the same number on each.
    The weights are costs of the embedding, and of norm, projection and loss, in layers. Returns the
    layers of every stage, at least one each. Raises ValueError: there are fewer layers than stages.
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
    """Distributes layers: `least` to each place, then one by one to the place with the lowest cost.
    `extra` is the initial cost of each place."""
    counts = [least] * len(extra)
    costs = [(round(least + more, 9), index) for index, more in enumerate(extra)]
    heapify(costs)
    for _ in range(layers - least * len(extra)):
        index = costs[0][1]
        counts[index] += 1
        heapreplace(costs, (round(counts[index] + extra[index], 9), index))
    return counts


def _suffixes(total: int, num_stages: int, combine: _Combine) -> list[list[float]]:
    """Returns best[s][i]: the smallest value for stages from s on that hold the layers from i on.
    `combine` adds a stage to the value of the later ones."""
    best = [[_NEVER] * (total + 1) for _ in range(num_stages + 1)]
    best[num_stages][total] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        following = best[stage + 1]
        for start in range(total):
            ends = (end for end in range(start + 1, total + 1) if following[end] < _NEVER)
            best[stage][start] = min((combine(stage, start, end, following[end]) for end in ends), default=_NEVER)
    return best


def _deal(num_layers: int, num_stages: int, first: int, last: int) -> list[int]:
    each, rest = divmod(num_layers + first + last, num_stages)
    cut = [each + (stage < rest) for stage in range(num_stages)]
    cut[0] -= first
    cut[-1] -= last
    return cut


def _first_empty(num_layers: int, num_stages: int, first: int, last: int) -> int | None:
    """Returns the first stage to which `_deal` gives no layer; None if all have one."""
    each, rest = divmod(num_layers + first + last, num_stages)
    if each + (rest > 0) - first < 1:
        return 0
    middle = max(1, rest) if each == 0 else num_stages  # from there on, `each`
    if middle < num_stages - 1:
        return middle
    return num_stages - 1 if each - last < 1 else None
