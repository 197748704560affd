"""The choice of the warm-up depth from times and memory."""

from functools import partial

import pytest

from raypp.planning.choose_lookahead import Depth, best_depth
from raypp.planning.choose_lookahead import depths as depths_of
from raypp.planning.schedules.catalogue import build_program
from raypp.planning.schedules.simulate import Simulator, StageTimes


def depths(
    schedule: str, pp: int, microbatches: int, times: StageTimes, most_in_flight: list[int] | None = None
) -> list[Depth]:
    program = partial(build_program, schedule, pp, 1, microbatches)
    return depths_of(lambda lookahead: Simulator(program(lookahead)), microbatches, times, most_in_flight)


@pytest.mark.parametrize(
    ("link", "classic", "one_more"),
    [(0.1, 0.94, 0.99), (0.5, 0.80, 0.97), (1.0, 0.67, 0.95), (1.5, 0.57, 0.92), (2.0, 0.50, 0.81)],
)
def test_four_ranks_reach_these_shares_of_a_free_link(link, classic, one_more):
    """Forward 1, backward 2, 32 microbatches: computed independently of the simulator."""
    free = depths("1f1b", 4, 32, StageTimes.equal(4))[0].step_s
    found = depths("1f1b", 4, 32, StageTimes.equal(4, link=link))
    assert free / found[0].step_s == pytest.approx(classic, abs=0.015)
    assert free / found[1].step_s == pytest.approx(one_more, abs=0.015)


def test_a_free_link_needs_no_deeper_warm_up():
    assert best_depth(depths("1f1b", 4, 16, StageTimes.equal(4))).lookahead == 0


def test_a_message_longer_than_a_forward_needs_a_second_forward_per_link():
    assert best_depth(depths("1f1b", 4, 32, StageTimes.equal(4, link=1.0))).lookahead == 1
    assert best_depth(depths("1f1b", 4, 32, StageTimes.equal(4, link=2.0))).lookahead == 2


def test_memory_limits_the_depth_but_never_below_the_classic_warm_up():
    times = StageTimes.equal(4, link=1.0)
    assert [depth.lookahead for depth in depths("1f1b", 4, 32, times, most_in_flight=[4, 3, 2, 1])] == [0]
    assert [depth.lookahead for depth in depths("1f1b", 4, 32, times, most_in_flight=[1, 1, 1, 1])] == [0]
    limited = depths("1f1b", 4, 32, times, most_in_flight=[8, 8, 8, 8])
    assert [depth.lookahead for depth in limited] == [0, 1]
    assert limited[1].timeline.in_flight == [7, 5, 3, 1]


def on_a_cable(schedule: str, pp: int, link: float) -> list[Depth]:
    """Depths where a message takes `link` forwards of a rank, which has two stages."""
    program = partial(build_program, schedule, pp, 2, 8 * pp)
    times = StageTimes([0.5] * 2 * pp, [1.0] * 2 * pp, link=link)
    return depths_of(lambda lookahead: Simulator(program(lookahead)), 8 * pp, times)


@pytest.mark.parametrize(
    ("schedule", "half", "whole"),
    [("interleaved_1f1b", 0.96, 0.90), pytest.param("interleaved_zero_bubble", 0.95, 0.88, marks=pytest.mark.slow),
     pytest.param("zbv", 0.95, 0.90, marks=pytest.mark.slow), ("dualpipev", 0.96, 0.89)],
)  # fmt: skip
def test_schedules_with_several_stages_per_rank_reach_these_shares_of_a_free_link(schedule, half, whole):
    """A message takes half a forward of a rank, and a whole one."""
    free = min(depth.step_s for depth in on_a_cable(schedule, 4, 0.0))
    for link, share in ((0.5, half), (1.0, whole)):
        assert free / best_depth(on_a_cable(schedule, 4, link)).step_s > share


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_the_list_scheduler_without_its_clock_of_messages_would_lose_a_third(schedule):
    classic, *deeper = on_a_cable(schedule, 4, 0.5)
    assert min(depth.step_s for depth in deeper) < classic.step_s / 1.5


def test_a_schedule_without_a_warm_up_has_one_depth():
    assert [depth.lookahead for depth in depths("gpipe", 4, 8, StageTimes.equal(4, link=1.0))] == [0]
