"""What `link_hiding --on-paper` says about four hosts: no step is below its bound, and orders among
messages bring what the decision page says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.link_bounds import OWN_CUT, bound_s, stage_times
from benchmarks.link_orders import DEPTHS, ORDERS, seconds
from benchmarks.paced import HEAD
from benchmarks.timed_rank import job_of
from benchmarks.torch_1f1b_on_paper import torch_1f1b_s
from raypp.planning.choose_lookahead import best_depth, depths
from raypp.planning.resolve import cut_of
from raypp.schedules.one_f_one_b import build
from raypp.schedules.simulate import Simulator, StageTimes

pytestmark = pytest.mark.slow

LAYERS, MICROBATCHES = [2, 2, 2, 2], 16


def simulator(depth: int) -> Simulator:
    return Simulator(build(4, 1, MICROBATCHES, depth))


def best_s(times: StageTimes) -> float:
    return best_depth(depths(simulator, MICROBATCHES, times)).step_s


@pytest.mark.parametrize("head", [0.0, HEAD])
@pytest.mark.parametrize("link", [0.25, 0.5, 1.0, 1.5, 2.0, 2.5])
def test_no_depth_and_no_order_is_below_the_bound(head: float, link: float) -> None:
    times = replace(stage_times(LAYERS, head), link=link)
    bound = bound_s(times, MICROBATCHES)
    for depth in DEPTHS:
        assert all(seconds(simulator(depth), times, order) >= bound * (1 - 1e-9) for order in ORDERS)
    assert best_s(times) <= 1.05 * bound, "the chosen depth comes near it"


def test_the_goals_are_within_the_bounds_for_the_benchmarks_own_cut() -> None:
    times = stage_times(LAYERS)
    free = simulator(0).run(times).makespan
    assert free / best_s(replace(times, link=1.0)) > 0.88
    assert free / best_s(replace(times, link=2.0)) > 0.75
    assert free / best_s(replace(times, link=2.0 * 260 / 1024)) > 0.93


def test_an_order_brings_little_at_the_best_depth_and_gradients_first_costs() -> None:
    times = replace(stage_times(LAYERS, 0.0), link=2.0)
    steps = {order: [seconds(simulator(depth), times, order) for depth in DEPTHS] for order in ORDERS}
    best = {order: min(found) for order, found in steps.items()}
    assert 0.97 < best["needed first"] / best["equal shares"] < 1.0
    assert best["gradients first"] > 1.2 * best["equal shares"]
    assert best["one at a time"] > 1.04 * best["equal shares"]
    assert steps["equal shares"][1] > 1.1 * steps["needed first"][1], "where memory allows no more than 1"


def test_torchs_schedule_is_raypps_without_a_limit_and_pays_for_a_link_that_carries_one_message() -> None:
    times = stage_times(LAYERS)
    alone = [torch_1f1b_s(times.forward, times.backward, MICROBATCHES, 0.0, both_ways=way) for way in (True, False)]
    assert alone == pytest.approx([simulator(0).run(times).makespan] * 2)
    one, both = (torch_1f1b_s(times.forward, times.backward, MICROBATCHES, 1.0, both_ways=way) for way in (False, True))
    assert both < one


def test_a_message_of_a_forward_does_not_allow_the_goal_against_torch_on_the_same_cut() -> None:
    times = stage_times(LAYERS)
    theirs = torch_1f1b_s(times.forward, times.backward, MICROBATCHES, 1.0, both_ways=False)
    assert theirs / bound_s(replace(times, link=1.0), MICROBATCHES) < 1.6
    assert theirs / best_s(replace(stage_times(OWN_CUT), link=1.0)) > 1.6, "raypp's own cut does"


def test_own_cut_is_raypps() -> None:
    assert cut_of(job_of([], world=4, steps=1)) == OWN_CUT
