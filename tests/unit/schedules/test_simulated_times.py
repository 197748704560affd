"""The simulator's times, links and bubbles, and the pictures of programs."""

import pytest

from raypp.planning.plan import bubble_fraction, bubble_overhead
from raypp.planning.schedules.action import parse_actions
from raypp.planning.schedules.catalogue import build_program
from raypp.planning.schedules.one_f_one_b import build as build_1f1b
from raypp.planning.schedules.picture import draw
from raypp.planning.schedules.simulate import StageTimes, Timeline, simulate


def times_of(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {str(slot.action): (slot.start, slot.end) for slot in timeline.slots[rank]}


@pytest.mark.parametrize(
    ("pp", "microbatches", "fraction", "overhead"), [(2, 3, 0.25, 0.3333), (4, 16, 0.1579, 0.1875), (1, 4, 0, 0)]
)
def test_the_two_bubbles_of_the_textbook(pp: int, microbatches: int, fraction: float, overhead: float) -> None:
    assert bubble_fraction(pp, microbatches) == pytest.approx(fraction, abs=5e-5)
    assert bubble_overhead(pp, microbatches) == pytest.approx(overhead, abs=5e-5)


def test_stages_per_rank_count_as_so_many_more_microbatches() -> None:
    assert bubble_fraction(4, 8, 2) == bubble_fraction(4, 16)
    assert bubble_overhead(4, 8, 2) == bubble_overhead(4, 16)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 3)])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 8), (4, 16), (4, 8)])
def test_simulated_bubbles_are_the_textbooks(name: str, v: int, pp: int, microbatches: int) -> None:
    timeline = simulate(build_program(name, pp, v, microbatches), StageTimes.equal(pp * v))
    assert timeline.bubble == pytest.approx(bubble_fraction(pp, microbatches, v))


def test_times_by_hand() -> None:
    timeline = simulate(build_1f1b(2, 1, 2), StageTimes([1, 2], [3, 4], link=0.5))
    assert times_of(timeline, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (8, 11), "0B1": (14, 17)}
    assert times_of(timeline, 1) == {"1F0": (1.5, 3.5), "1B0": (3.5, 7.5), "1F1": (7.5, 9.5), "1B1": (9.5, 13.5)}
    assert timeline.makespan == 17
    assert list(timeline.idle) == [9, 5]


def test_messages_of_one_direction_follow_one_another() -> None:
    rows = {0: parse_actions("0F0 0F1 0B0 0B1"), 1: parse_actions("1F0 1F1 1B0 1B1")}
    timeline = simulate(rows, StageTimes([1, 1], [1, 1], link=3))
    # 0F0 is sent from 1 to 4. 0F1 is done at 2, but is sent only from 4 to 7.
    assert times_of(timeline, 1)["1F0"] == (4, 5)
    assert times_of(timeline, 1)["1F1"] == (7, 8)


def test_stages_of_one_rank_hand_over_at_once() -> None:
    timeline = simulate(build_program("zbv", 1, 2, 2), StageTimes.equal(2, link=100))
    assert timeline.bubble == 0


def test_split_backwards_take_as_long_as_whole_ones() -> None:
    rows = {0: parse_actions("0F0 0I0 0W0")}
    timeline = simulate(rows, StageTimes([1], [4], input_share=0.25))
    assert times_of(timeline, 0) == {"0F0": (0, 1), "0I0": (1, 2), "0W0": (2, 5)}


def test_split_backwards_may_take_longer_and_the_first_stage_does_not_split_its_own() -> None:
    rows = {0: parse_actions("0F0 1F0 1I0 1W0 0I0 0W0")}
    times = StageTimes([1, 1], [4, 4], input_share=0.75, weight_share=0.5, first_whole=True)
    found = times_of(simulate(rows, times), 0)
    assert (found["1I0"], found["1W0"]) == ((2, 5), (5, 7))
    assert (found["0I0"], found["0W0"]) == ((7, 7), (7, 11))


def test_a_wide_picture_is_cut_and_says_so() -> None:
    picture = draw(build_1f1b(4, 1, 64), 80)
    *rows, signs = picture.splitlines()
    assert {len(row) for row in rows} == {80} and all(row.endswith("…") for row in rows) and "… truncated" in signs
