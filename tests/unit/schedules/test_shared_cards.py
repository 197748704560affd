"""Messages that share network cards, and actions whose times vary."""

import random
from dataclasses import replace

import pytest

from raypp.planning.schedules.action import Program, parse_actions
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.one_f_one_b import build as build_1f1b
from raypp.planning.schedules.simulate import Simulator, StageTimes, Timeline, simulate

CROSSING: Program = {0: parse_actions("0F0 0F1 0B0"), 1: parse_actions("1F0 1F1 1B0"), 2: parse_actions("2F0 2B0 2F1")}
"""Rank 1 sends the activation of 1F1 to rank 2 and the gradient of 1B0 to rank 0."""


def times_of(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {str(slot.action): (slot.start, slot.end) for slot in timeline.slots[rank]}


def test_two_messages_that_leave_a_card_together_take_twice_as_long_each() -> None:
    times = StageTimes([1, 3, 1], [1, 0, 1], link=1)
    apart, shared = simulate(CROSSING, times), simulate(CROSSING, replace(times, cards=[0, 1, 2]))
    # 1F0 ends at 5, 1F1 at 8; the gradient of 2B0 (7 to 8) arrives at 9, and 1B0 takes no time: its
    # gradient leaves from 9 to 10. The activation of 1F1 is on its way from 8 to 9.
    assert times_of(apart, 2) == {"2F0": (6, 7), "2B0": (7, 8), "2F1": (9, 10)}
    assert times_of(apart, 0)["0B0"] == (10, 11)
    assert shared.makespan == apart.makespan

    times = replace(times, backward=[1, 0, 0])  # now both are ready at 8
    apart, shared = simulate(CROSSING, times), simulate(CROSSING, replace(times, cards=[0, 1, 2]))
    assert times_of(apart, 2)["2F1"] == (9, 10) and times_of(apart, 0)["0B0"] == (9, 10)
    assert times_of(shared, 2)["2F1"] == (10, 11) and times_of(shared, 0)["0B0"] == (10, 11)
    private = simulate(CROSSING, replace(times, cards=[0, None, 2]))
    assert private.slots == apart.slots, "a host with a card for each neighbour"


def test_a_card_is_free_for_the_rest_of_a_message_once_the_other_has_left() -> None:
    times = StageTimes([1, 3, 1], [1, 0, 0.5], link=1, cards=[0, 1, 2])
    found = simulate(CROSSING, times)
    # The activation leaves alone from 8 to 8.5, then both until 9.5, then the gradient alone.
    assert times_of(found, 2)["2F1"] == (9.5, 10.5)
    assert times_of(found, 0)["0B0"] == (10, 11)


def test_what_leaves_and_what_arrives_do_not_disturb_each_other() -> None:
    for depth in (0, 2):
        program, times = build_1f1b(2, 1, 16, depth), StageTimes.equal(2, link=1.5)
        assert simulate(program, replace(times, cards=[0, 1])).slots == simulate(program, times).slots


def test_messages_between_ranks_of_one_host_do_not_use_its_card() -> None:
    program, times = build_1f1b(4, 1, 16, 1), StageTimes.equal(4, link=[0.1, 2.0, 0.1])
    assert simulate(program, replace(times, cards=[0, 0, 1, 1])).slots == simulate(program, times).slots


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_following_events_gives_the_times_of_one_pass_where_nothing_is_shared(name: str) -> None:
    each = schedule_named(name).nearest_stages(2)
    for depth in (0, 2):
        program = build_program(name, 4, each, 16, depth)
        times = StageTimes.equal(4 * each, link=0.75)
        one_pass, events = simulate(program, times), simulate(program, replace(times, cards=[None] * 4))
        assert events.slots == one_pass.slots
        assert (events.makespan, events.busy, events.idle) == (one_pass.makespan, one_pass.busy, one_pass.idle)


@pytest.mark.parametrize(
    ("link", "depth", "step"), [(1.0, 0, 85), (1.0, 1, 63), (1.5, 2, 66), (2.0, 0, 120), (2.0, 2, 82), (2.0, 3, 80)]
)
def test_four_hosts_with_a_card_each(link: float, depth: int, step: float) -> None:
    """Forward 1, backward 2, 16 microbatches: computed by another program, which shares rates by
    walking through all messages at every change."""
    times = StageTimes.equal(4, link=link)
    assert simulate(build_1f1b(4, 1, 16, depth), replace(times, cards=[0, 1, 2, 3])).makespan == pytest.approx(step)


def test_sharing_never_makes_a_step_shorter_and_loads_of_one_card_add_up() -> None:
    for depth in range(4):
        for link in (0.5, 1.0, 2.0, 3.0):
            simulator, times = Simulator(build_1f1b(4, 1, 16, depth)), StageTimes.equal(4, link=link)
            apart, shared = simulator.run(times), simulator.run(replace(times, cards=[0, 1, 2, 3]))
            assert shared.makespan >= apart.makespan
            assert shared.makespan >= 2 * 16 * link, "a host in the middle sends two messages per microbatch"


def test_varied_times_are_the_same_for_all_and_near_the_given_ones() -> None:
    times = StageTimes.equal(4, link=0.5)
    simulator = Simulator(build_1f1b(4, 1, 16, 1))
    assert simulator.run_varied(times, 5) == [simulator.run(times).makespan]
    varied = simulator.run_varied(replace(times, spread=0.2), 5)
    assert len(set(varied)) == 5
    assert varied == Simulator(build_1f1b(4, 1, 16, 1)).run_varied(replace(times, spread=0.2), 5)
    assert all(abs(step / simulator.run(times).makespan - 1) < 0.1 for step in varied)


def test_a_draw_gives_an_action_one_time_in_all_programs() -> None:
    def lasts(depth: int) -> dict[str, float]:
        timeline = Simulator(build_1f1b(2, 1, 6, depth))._run_by_events(times, random.Random(3))
        return {str(slot.action): round(slot.end - slot.start, 9) for row in timeline.slots.values() for slot in row}

    times = StageTimes([1.0, 1.0], [2.0, 2.0], spread=0.3)
    assert lasts(0) == lasts(2)
    assert len(set(lasts(0).values())) > 10


def test_messages_vary_on_their_own() -> None:
    times = StageTimes.equal(4, link=2.0)
    simulator = Simulator(build_1f1b(4, 1, 16, 2))
    varied = simulator.run_varied(replace(times, cards=[0, 1, 2, 3], link_spread=0.2), 4)
    assert len(set(varied)) == 4
    slots = simulator._run_by_events(replace(times, link_spread=0.2), random.Random(1)).slots
    assert {round(slot.end - slot.start, 9) for row in slots.values() for slot in row} == {1.0, 2.0}
