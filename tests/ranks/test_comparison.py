"""The comparison of sums fails for a wrong sum and passes for a sum in another order; ranks come
from a process that has imported what they need, and keep the environment of the tests.

The tests of the comparison compose a step's gradient from those of its microbatches, each trained
alone.
"""

import os
import sys
from functools import cache
from typing import Any

import pytest
import torch
from comparison import FIRST_STEP, WIDE, assert_close, assert_same_sums
from harness import OWN_PATH, run_in_turn, run_ranks
from training import Numbers, document, train_steps

MICROBATCHES = 4
WEIGHT = "model.layers.0.self_attn.k_proj.weight"


@cache
def trained() -> list[dict[torch.dtype, dict[str, Any]]]:
    """Returns by dtype: a step of all microbatches, then steps with labels in one of them."""
    job = document(microbatches=MICROBATCHES, train={"clip_norm": None})
    every = range(MICROBATCHES)
    blanks = [(), *(tuple(other for other in every if other != only) for only in every)]
    types = (torch.float64, torch.float32)
    found = run_in_turn(1, train_steps, [(job, 1, "cpu", blank, dtype) for blank in blanks for dtype in types])
    results = [result for (result,) in found]
    return [dict(zip(types, results[2 * i : 2 * i + 2], strict=True)) for i in range(len(blanks))]


def added(dtype: torch.dtype, factors: list[float], order: list[int]) -> dict[str, Any]:
    """Returns a step whose gradient adds its microbatches' contributions, each times a factor."""
    whole, *parts = (result[dtype] for result in trained())
    total: dict[str, torch.Tensor] = {}
    for index in order:
        share = factors[index] * parts[index]["tokens"][0] / whole["tokens"][0]
        for name, value in parts[index]["gradients"][0].items():
            total[name] = total[name] + share * value if name in total else share * value
    return {**whole, "gradients": [total]}


def numbers(factors: list[float], order: list[int]) -> Numbers:
    return Numbers(*(added(dtype, factors, order) for dtype in (torch.float64, torch.float32)))


def whole_step() -> Numbers:
    return Numbers(trained()[0][torch.float64], trained()[0][torch.float32])


def scaled(microbatch: int, factor: float) -> list[float]:
    return [factor if index == microbatch else 1.0 for index in range(MICROBATCHES)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["in order", "in another"])
def test_the_contributions_of_all_microbatches_are_the_step_in_any_order(order: list[int]) -> None:
    assert_same_sums(numbers([1.0] * MICROBATCHES, order), whole_step())


@pytest.mark.parametrize("factor", [0.0, 2.0, 1 + 1e-4, 1 + 1e-6, 1 - 1e-8])
@pytest.mark.parametrize("microbatch", range(MICROBATCHES))
def test_a_contribution_that_is_dropped_doubled_or_scaled_is_found(microbatch: int, factor: float) -> None:
    wrong = numbers(scaled(microbatch, factor), list(range(MICROBATCHES)))
    with pytest.raises(AssertionError, match=r"step 1: .*weight: "):
        assert_same_sums(wrong, whole_step())


@pytest.mark.parametrize("factor", [0.0, 2.0, 1 + 1e-4])
def test_a_fault_that_only_fp32_has_is_found(factor: float) -> None:
    right = whole_step()
    wrong = added(torch.float32, scaled(1, factor), list(range(MICROBATCHES)))
    with pytest.raises(AssertionError, match=r"step 1: .*weight: "):
        assert_same_sums(Numbers(right.wide, wrong), right)


def test_numbers_of_fp32_do_not_pass_for_those_of_fp64() -> None:
    right = whole_step()
    with pytest.raises(AssertionError):
        assert_same_sums(Numbers(right.first, right.first), Numbers(right.first, right.first))


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, WIDE), (torch.float32, FIRST_STEP)], ids=str)
def test_a_sum_that_every_rank_reports_is_held_to_the_same_bound(key: str, dtype: torch.dtype, bound: float) -> None:
    right = trained()[0][dtype]
    assert_close({**right, key: [right[key][0] * (1 + bound / 2)]}, right, bound)
    with pytest.raises(AssertionError):
        assert_close({**right, key: [right[key][0] * (1 + 2 * bound)]}, right, bound)


@pytest.mark.parametrize("change", [{WEIGHT: torch.zeros(1, 1)}, {"another": torch.zeros(1)}], ids=["shape", "name"])
def test_a_gradient_of_another_shape_or_name_is_found(change: dict[str, torch.Tensor]) -> None:
    right = trained()[0][torch.float64]
    with pytest.raises(AssertionError):
        assert_close({**right, "gradients": [right["gradients"][0] | change]}, right, WIDE)


def test_a_weight_that_was_updated_otherwise_is_found() -> None:
    right = whole_step()
    weights = right.wide["weights"]
    wrong = Numbers({**right.wide, "weights": weights | {WEIGHT: weights[WEIGHT] * (1 + 1e-9)}}, right.first)
    with pytest.raises(AssertionError, match="k_proj"):
        assert_same_sums(wrong, right)


def seen(rank: int, world: int, port: int) -> tuple[bool, dict[str, str]]:
    return "forked" in sys.modules, {name: os.environ[name] for name in ("PYTHONPATH", OWN_PATH) if name in os.environ}


def test_ranks_are_forked_from_a_prepared_process_and_keep_the_path_of_the_tests() -> None:
    own = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    assert run_ranks(2, seen) == [(True, own)] * 2
