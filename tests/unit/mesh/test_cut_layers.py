"""Cuts of layers into stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import JobError
from raypp.planning.cut import balance, balance_ranks, cut_layers, most_stages
from raypp.planning.seating import place_stages

TABLE = {
    (36, 2): [18, 18],
    (36, 4): [9, 10, 9, 8],
    (32, 3): [11, 11, 10],
    (32, 4): [8, 9, 8, 7],
    (32, 5): [6, 7, 7, 7, 5],
    (80, 4): [20, 21, 20, 19],
    (80, 8): [10, 11, 10, 10, 10, 10, 10, 9],
    (48, 5): [9, 10, 10, 10, 9],
    (61, 16): [3, *[4] * 14, 2],
    (8, 4): [2, 3, 2, 1],
}


@pytest.mark.parametrize(("sizes", "cut"), TABLE.items())
def test_whole_weights_give_the_table(sizes: tuple[int, int], cut: list[int]) -> None:
    assert cut_layers(*sizes) == cut


@pytest.mark.parametrize(("layers", "stages", "most"), [(4, 4, 3), (5, 4, 3), (6, 8, 4)])
def test_a_stage_without_a_layer_is_a_problem_that_names_the_largest_pp_that_works(
    layers: int, stages: int, most: int
) -> None:
    with pytest.raises(JobError) as caught:
        cut_layers(layers, stages)
    (problem,) = caught.value.problems
    assert problem.key == "mesh.pp"
    assert f"{stages} stages for {layers} layers leave stage" in problem.fault
    assert f"mesh.pp ≤ {most}" in problem.fix
    cut_layers(layers, most)
    assert most_stages(layers) == most


def test_the_rest_of_a_balanced_cut_is_even_too() -> None:
    assert balance([1.0] * 10, 4, 0.2, 0.3) == [2, 3, 3, 2]
    # The costliest stage costs 4 in every cut; [1, 3, 1] has less even costs.
    assert balance([4, 1, 1, 1, 1], 3) == [1, 2, 2]


def test_fewer_layers_than_stages_cannot_be_balanced() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        balance([1, 1], 3)


costs = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(costs, st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_no_cut_has_a_cheaper_costliest_stage(layers: list[int], stages: int, first: int, last: int) -> None:
    stages = min(stages, len(layers))

    def largest(cut: list[int]) -> int:
        found, start = [], 0
        for count in cut:
            found.append(sum(layers[start : start + count]))
            start += count
        found[0] += first
        found[-1] += last
        return max(found)

    cut = balance([float(cost) for cost in layers], stages, first, last)
    assert sum(cut) == len(layers) and min(cut) > 0
    borders = combinations(range(1, len(layers)), stages - 1)
    every = ([b - a for a, b in zip((0, *inner), (*inner, len(layers)), strict=True)] for inner in borders)
    assert largest(cut) == min(map(largest, every))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 6), st.floats(0, 6))
def test_every_cut_keeps_all_layers_and_fills_all_stages(layers: int, stages: int, first: float, last: float) -> None:
    try:
        cut = cut_layers(layers, stages, first, last)
    except JobError:
        return
    assert len(cut) == stages and sum(cut) == layers and min(cut) >= 1


@pytest.mark.parametrize(
    ("layers", "pp", "weights", "cut"),
    [
        (16, 2, (0, 0), [4, 4, 4, 4]),
        (16, 2, (1, 1), [4, 5, 4, 3]),  # ranks: 7 + 2 and 9
        (36, 4, (0, 4), [5, 5, 5, 5, 5, 5, 5, 1]),  # ranks: 6 + 4 and 10, 10, 10
        (8, 2, (0.05, 1.25), [2, 3, 2, 1]),
        (8, 4, (0, 30), [1] * 8),
        (2, 1, (0, 0), [1, 1]),
    ],
)
def test_a_cut_in_a_v_is_even_over_ranks(layers: int, pp: int, weights: tuple[float, float], cut: list[int]) -> None:
    assert balance_ranks(layers, place_stages(pp, 2 * pp, "v"), *weights) == cut


@given(st.integers(1, 3), st.integers(0, 5), st.floats(0, 3).map(lambda x: round(x, 2)), st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_no_other_cut_has_a_cheaper_costliest_rank(pp: int, more: int, first: float, percent: int) -> None:
    last = percent / 100
    placement = place_stages(pp, 2 * pp, "v")
    layers = 2 * pp + more
    found = balance_ranks(layers, placement, first, last)

    def costliest(cut: tuple[int, ...] | list[int]) -> float:
        return max(sum(cut[s] for s in held) + (first + last if 0 in held else 0) for held in placement)

    assert sum(found) == layers and min(found) >= 1 and len(found) == 2 * pp
    borders = combinations(range(1, layers), 2 * pp - 1)
    others = (tuple(b - a for a, b in pairwise((0, *chosen, layers))) for chosen in borders)
    assert costliest(found) <= min(map(costliest, others)) + 1e-6


def test_fewer_layers_than_stages_of_a_v_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        balance_ranks(3, [[0, 3], [1, 2]])
