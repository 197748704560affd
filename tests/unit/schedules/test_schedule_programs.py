"""Every schedule passes the check and the simulator for many sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import JobError
from raypp.planning.schedules.action import Action, parse_actions, splits_backward
from raypp.planning.schedules.catalogue import (
    SCHEDULES,
    build_forward_only,
    build_program,
    check_program,
    schedule_named,
)
from raypp.planning.schedules.one_f_one_b import build as build_1f1b
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.planning.seating import place_stages

sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2))
times = st.floats(0.1, 3)


def allowed(name: str, pp: int, stages_per_rank: int, microbatches: int) -> tuple[int, int, int]:
    schedule = schedule_named(name)
    return pp, schedule.nearest_stages(stages_per_rank), max(microbatches, schedule.least_microbatches(pp))


@pytest.mark.parametrize("name", SCHEDULES.names())
@settings(max_examples=60, deadline=None)
@given(sizes, times, times, st.floats(0, 2))
def test_every_program_is_valid_and_runs(
    name: str, drawn: tuple[int, int, int, int], forward: float, backward: float, link: float
) -> None:
    pp, stages_per_rank, microbatches = allowed(name, *drawn[:3])
    stages = pp * stages_per_rank
    program = build_program(name, pp, stages_per_rank, microbatches, drawn[3])
    placement = place_stages(pp, stages, schedule_named(name).placement)
    assert check_program(program, placement, microbatches) == []
    timeline = simulate(program, StageTimes.equal(stages, forward, backward, link))
    work = (forward + backward) * microbatches * stages_per_rank
    assert timeline.makespan >= work * (1 - 1e-9)
    assert all(idle == pytest.approx(timeline.makespan - work, abs=1e-6) for idle in timeline.idle)
    assert all(0 < peak <= microbatches for peak in timeline.in_flight)


@pytest.mark.parametrize("name", [kind.name for kind in SCHEDULES if kind.splits_backward])
@settings(max_examples=60, deadline=None)
@given(sizes)
def test_a_program_with_whole_backwards_is_valid_and_holds_no_more_microbatches(
    name: str, drawn: tuple[int, int, int, int]
) -> None:
    sized = allowed(name, *drawn[:3])
    pp, stages_per_rank, microbatches = sized
    split, whole = (build_program(name, *sized, drawn[3], whole_backwards=one) for one in (False, True))
    stages = pp * stages_per_rank
    assert check_program(whole, place_stages(pp, stages, schedule_named(name).placement), microbatches) == []
    assert not splits_backward(whole)
    equal = StageTimes.equal(stages)
    held, usual = simulate(whole, equal).in_flight, simulate(split, equal).in_flight
    assert all(a <= b for a, b in zip(held, usual, strict=True))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_what_a_schedule_says_of_itself_is_so(name: str) -> None:
    schedule = schedule_named(name)
    least, most = schedule.stages_per_rank
    assert 1 <= least <= most and schedule.summary and schedule.source
    assert schedule.placement == "loop" or (least, most) == (2, 2)
    assert bool(schedule.microbatches_per_rank) == bool(schedule.reason)
    split = {"I", "W"}
    for pp, stages_per_rank in ((2, least), (4, min(most, 3))):
        microbatches = max(8, schedule.least_microbatches(pp))
        program = build_program(name, pp, stages_per_rank, microbatches)
        assert bool(split & {a.kind for actions in program.values() for a in actions}) == schedule.splits_backward
        if schedule.microbatches_per_rank:
            with pytest.raises(JobError, match=r"pipeline.microbatches: .* too few"):
                build_program(name, pp, stages_per_rank, schedule.least_microbatches(pp) - 1)


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(["loop", "v"]))
def test_forward_only_programs_are_valid(drawn: tuple[int, int, int, int], placement: str) -> None:
    pp, stages_per_rank, microbatches, _ = drawn
    if placement == "v":
        stages_per_rank = 2
    program = build_forward_only(pp, stages_per_rank, microbatches, placement)  # type: ignore[arg-type]
    placed = place_stages(pp, pp * stages_per_rank, placement)  # type: ignore[arg-type]
    assert check_program(program, placed, microbatches, trains=False) == []


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_1f1b_holds_one_microbatch_per_rank_below_and_the_lookahead(pp: int, lookahead: int) -> None:
    for microbatches in (pp, 2 * pp + 1, 40):
        timeline = simulate(build_1f1b(pp, 1, microbatches, lookahead), StageTimes.equal(pp))
        below = [pp - 1 - rank for rank in range(pp)]
        assert list(timeline.in_flight) == [min(microbatches, 1 + b + lookahead * b) for b in below]


def test_gpipe_and_looped_bfs_hold_all_microbatches() -> None:
    for name, stages_per_rank in (("gpipe", 1), ("looped_bfs", 2)):
        timeline = simulate(build_program(name, 3, stages_per_rank, 7), StageTimes.equal(3 * stages_per_rank))
        assert set(timeline.in_flight) == {7}


def test_lookahead_hides_the_link() -> None:
    slow = StageTimes.equal(4, link=1.0)
    classic = simulate(build_1f1b(4, 1, 32), slow).bubble
    ahead = simulate(build_1f1b(4, 1, 32, lookahead=1), slow).bubble
    assert ahead < classic - 0.1


def test_the_bubble_shrinks_from_1f1b_to_interleaved_to_zero_bubble() -> None:
    pp, microbatches = 4, 8
    bubbles = {
        name: simulate(build_program(name, pp, v, microbatches), StageTimes.equal(pp * v)).bubble
        for name, v in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2))
    }
    assert bubbles["zbv"] < bubbles["interleaved_1f1b"] < bubbles["1f1b"]
    assert bubbles["dualpipev"] < bubbles["interleaved_1f1b"]
    single = simulate(build_program("interleaved_zero_bubble", pp, 1, microbatches), StageTimes.equal(pp)).bubble
    assert single < bubbles["1f1b"]


def test_zbv_holds_no_more_than_1f1bs_first_rank() -> None:
    timeline = simulate(build_program("zbv", 4, 2, 16), StageTimes.equal(8))
    assert max(timeline.in_flight_on_rank) <= 2 * 4  # halves: two stages per rank


def test_stages_per_rank_that_a_schedule_cannot_do_are_refused() -> None:
    with pytest.raises(JobError, match=r"1f1b takes 1 per rank, not 2(.|\n)*interleaved_1f1b"):
        build_program("1f1b", 2, 2, 4)
    with pytest.raises(JobError, match=r"zbv takes 2 per rank, not 1(.|\n)*stages_per_rank 2"):
        build_program("zbv", 2, 1, 4)


def test_an_unknown_schedule_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(JobError, match="did you mean 'gpipe'"):
        build_program("gpip", 2, 1, 4)


def test_actions_print_and_parse() -> None:
    action = Action(12, "W", 30)
    assert str(action) == "12W30" and Action.parse(" 12W30 ") == action
    assert parse_actions("0F0, 0F1 ,,0B0") == [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0)]
    with pytest.raises(ValueError, match="0X1"):
        Action.parse("0X1")
