"""A prepared program, its situations, and the simulation with receives agree with the program."""

import pytest

from raypp.planning.schedules.action import Action
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, size_problems
from raypp.planning.schedules.communication import Line, Receive, sent_by
from raypp.planning.schedules.simulate import Simulator, StageTimes
from raypp.planning.schedules.waiting import without_repeats
from raypp.planning.seating import place_stages

SIZES = [(1, 1, 3), (2, 1, 5), (2, 2, 5), (3, 2, 8), (4, 1, 16), (4, 2, 9), (4, 3, 12)]


LONG = [(2, 1, 200), (4, 2, 64)]


def cases(*sizes: tuple[int, int, int]) -> list[tuple[str, tuple[int, int, int]]]:
    return [(name, one) for name in SCHEDULES.names() for one in sizes if not size_problems(SCHEDULES.get(name), *one)]


def uneven(stages: int) -> StageTimes:
    forward = [1.0 + 0.3 * (stage % 3) for stage in range(stages)]
    links = [0.1 * (1 + boundary % 4) for boundary in range(stages - 1)]
    return StageTimes(forward, [2.1 * time for time in forward], 0.6, links, 0.5, first_whole=True)


@pytest.mark.parametrize(("name", "sizes"), cases(*SIZES))
def test_receives_that_are_posted_at_the_start_delay_nothing(name: str, sizes: tuple[int, int, int]) -> None:
    pp, each, _ = sizes
    program = build_program(name, *sizes)
    placement = place_stages(pp, pp * each, SCHEDULES.get(name).placement)
    rank_of = [rank for _, rank in sorted((stage, rank) for rank, held in enumerate(placement) for stage in held)]
    lines: dict[int, Line] = {rank: [] for rank in program}
    for actions in program.values():
        for action in actions:
            if (message := sent_by(action, rank_of, range(pp * each))) is not None:
                lines[rank_of[message.to_stage]].append(Receive(message))
    for rank, actions in program.items():
        lines[rank] += actions
    simulator = Simulator(program)
    for times in (uneven(pp * each), StageTimes.equal(pp * each, link=1.5), uneven(pp * each)):
        fast, slow = simulator.run(times), simulator.run(times, lines)
        assert fast.slots == slow.slots
        assert (fast.makespan, fast.busy, fast.idle) == (slow.makespan, slow.busy, slow.idle)
        assert (fast.in_flight, fast.in_flight_on_rank) == (slow.in_flight, slow.in_flight_on_rank)


def situations(actions: list[Action]) -> list[tuple[object, ...]]:
    """Returns each situation with the action that is run in it, where it first appears."""
    held: dict[int, int] = {}
    halves: dict[int, int] = {}
    begun: set[int] = set()
    found: dict[tuple[object, ...], None] = {}
    for stage, kind, _ in actions:
        counts = (
            tuple(sorted((s, n) for s, n in held.items() if n)),
            tuple(sorted((s, n) for s, n in halves.items() if n)),
        )
        found[(*counts, frozenset(begun), stage, kind)] = None
        held[stage] = held.get(stage, 0) + {"F": 1, "I": 0}.get(kind, -1)
        halves[stage] = halves.get(stage, 0) + {"I": 1, "W": -1}.get(kind, 0)
        begun |= {stage} if kind in "BW" else set()
    return list(found)


@pytest.mark.parametrize(("name", "sizes"), cases(*SIZES, *LONG))
def test_situations_are_those_of_the_program_in_their_order(name: str, sizes: tuple[int, int, int]) -> None:
    for actions in build_program(name, *sizes).values():
        assert situations(without_repeats(actions)) == situations(list(actions))


def test_a_long_program_has_few_situations() -> None:
    assert len(without_repeats(build_program("1f1b", 4, 1, 1000)[0])) < 20
