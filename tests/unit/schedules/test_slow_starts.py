"""Cores that come back slow from a wait, in the simulation."""

from __future__ import annotations

import pytest

from raypp.schedules.one_f_one_b import build
from raypp.schedules.simulate import StageTimes, simulate
from raypp.schedules.slow_starts import SlowCores, SlowStart, SlowStarts


def starts(*known: tuple[float, float, float]) -> SlowStarts:
    found = SlowStarts.of(SlowStart(*one) for one in known)
    assert found is not None
    return found


def test_between_known_waits_a_core_is_slower_in_proportion() -> None:
    found = starts((4.0, 0.5, 2.0), (2.0, 0.25, 1.0))
    assert found.after(0.0) == (0.0, 0.0)
    assert found.after(1.0) == (0.125, 0.5)
    assert found.after(2.0) == (0.25, 1.0)
    assert found.after(3.0) == (0.375, 1.5)
    assert found.after(9.0) == (0.5, 2.0)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 2.0, 5.0])
def test_what_a_wait_cost_can_be_taken_off_again(seconds: float) -> None:
    found = starts((2.0, 0.5, 1.0), (4.0, 0.25, 2.0))
    for waited in (1.0, 2.0, 3.0, 9.0):
        slow = SlowCores(found, 1).seconds(0, waited, seconds)
        assert slow > seconds and found.at_full_speed(waited, slow) == pytest.approx(seconds)


def test_a_core_at_full_speed_has_no_slow_starts() -> None:
    assert SlowStarts.of([]) is None
    assert SlowStarts.of([SlowStart(1.0, 0.0, 0.0), SlowStart(2.0, 0.5, 0.0)]) is None
    assert SlowStarts.of([SlowStart(1.0, 0.5, 1.0), SlowStart(1.0, 0.0, 0.0)]) is None  # the last one counts


def test_a_core_is_slow_until_it_has_lost_what_it_loses() -> None:
    cores = SlowCores(starts((1.0, 0.5, 2.0)), 2)
    assert cores.seconds(0, 0.0, 2.0) == 2.0  # no wait
    assert [cores.seconds(0, waited, 2.0) for waited in (1.0, 0.0, 0.0)] == [3.0, 3.0, 2.0]
    assert cores.seconds(1, 5.0, 10.0) == 12.0  # a long pass loses no more
    # A short wait in between does not make it faster, and does not start it again.
    assert [cores.seconds(0, waited, 2.0) for waited in (1.0, 0.1, 0.0)] == [3.0, 3.0, 2.0]


def test_passes_after_a_wait_are_slow_in_the_simulation() -> None:
    # Rank 1 waits 1 for its first forward, and never again.
    program = build(2, 1, 2)
    usual = StageTimes([1, 1], [1, 1])
    assert [(str(s.action), s.start, s.end) for s in simulate(program, usual).slots[1]] == [
        ("1F0", 1, 2), ("1B0", 2, 3), ("1F1", 3, 4), ("1B1", 4, 5),
    ]  # fmt: skip
    slow = simulate(program, StageTimes([1, 1], [1, 1], slow_starts=starts((1.0, 0.5, 0.5))))
    assert [(str(s.action), s.start, s.end) for s in slow.slots[1]] == [
        ("1F0", 1, 2.5), ("1B0", 2.5, 3.5), ("1F1", 3.5, 4.5), ("1B1", 4.5, 5.5),
    ]  # fmt: skip
    # Rank 0 waits 1.5 for its first gradient, and 0.5 for its second.
    assert [(str(s.action), s.start, s.end) for s in slow.slots[0]] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 3.5, 5), ("0B1", 5.5, 6.75),
    ]  # fmt: skip
    assert slow.makespan == 6.75 and slow.busy == [4.75, 4.5]


def test_a_pipeline_that_never_waits_is_as_fast_on_slow_cores() -> None:
    program = build(1, 1, 4)
    times = StageTimes([1], [2], slow_starts=starts((0.001, 1.0, 1.0)))
    assert simulate(program, times).makespan == 12.0


def test_hiding_the_link_also_spares_the_slow_starts() -> None:
    def shorter(times: StageTimes) -> float:
        classic, ahead = (simulate(build(2, 1, 16, lookahead), times).makespan for lookahead in (0, 1))
        return classic - ahead

    awake = StageTimes.equal(2, link=0.5)
    asleep = StageTimes([1, 1], [2, 2], link=0.5, slow_starts=starts((0.5, 0.5, 0.5)))
    assert shorter(awake) == pytest.approx(7.0)
    assert shorter(asleep) > shorter(awake) + 3
