"""What waits to be known to have arrived follows from the program, as its lowered actions say."""

from math import inf
from typing import Any

import pytest

from raypp.planning.schedules.action import Action, Program, without_idle_backwards
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.posting import Posting
from raypp.planning.schedules.waiting import arrivals, waiting_sends, without_repeats
from raypp.planning.seating import place_stages
from raypp.stages.pipeline.runtime import lower
from raypp.torch_private import Computation, LoweredAction

SENDS = {Computation.SEND_F: "F", Computation.SEND_B: "B"}
USES = {Computation.FORWARD: "F", Computation.FULL_BACKWARD: "B", Computation.BACKWARD_INPUT: "B"}


def sent(action: LoweredAction) -> tuple[str, int, int | None] | None:
    kind = SENDS.get(action.computation_type)
    return None if kind is None else (kind, action.stage_index, action.microbatch_index)


def used(action: LoweredAction) -> tuple[str, int, int | None] | None:
    kind = USES.get(action.computation_type)
    source = action.stage_index + (-1 if kind == "F" else 1)
    return None if kind is None else (kind, source, action.microbatch_index)


def released(program: Program, rank_of: list[int], microbatches: int, posting: Posting) -> dict[str, tuple[int, int]]:
    """Returns the activations and gradients that are not known to have arrived as each action
    begins: a message proves that all that its sender used before it have."""
    lowered, found = lower(program, rank_of, microbatches, posting), {}
    used_at = {(rank, used(action)): at for rank, line in lowered.items() for at, action in enumerate(line)}
    sent_at = {sent(action): at for line in lowered.values() for at, action in enumerate(line) if sent(action)}
    known = arrivals(program)
    for rank, line in lowered.items():
        held: list[Any] = []
        for action in line:
            forward = sum(kind == "F" for kind, *_ in held)
            found[str(action)] = forward, len(held) - forward
            if (message := sent(action)) is not None:
                held.append(message)
            elif (proof := used(action)) is not None and proof in sent_at:
                peer = rank_of[proof[1]]
                arrived = {one for one in held if used_at.get((peer, one), inf) < sent_at[proof]}
                assert set(known[rank].get(Action.parse(str(action)), ())) == arrived
                held = [one for one in held if one not in arrived]
    return found


def resolved(name: str, pp: int, stages: int, microbatches: int, lookahead: int) -> tuple[Program, list[int]]:
    kind = schedule_named(name)
    each = kind.nearest_stages(stages)
    holder = {s: rank for rank, held in enumerate(place_stages(pp, pp * each, kind.placement)) for s in held}
    return build_program(name, pp, each, microbatches, lookahead), [holder[stage] for stage in range(pp * each)]


@pytest.mark.parametrize("frozen", [0, 1, 3])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("posting", ["ahead", "one_order"])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_what_waits_is_what_the_runtime_holds(name: str, posting: Posting, lookahead: int, frozen: int) -> None:
    program, rank_of = resolved(name, 4, 2, 12, lookahead)
    program = without_idle_backwards(program, [stage >= frozen for stage in range(len(rank_of))])
    expected = released(program, rank_of, 12, posting)
    for waiting in waiting_sends(program).values():
        found = {str(action): (held.activations + held.frozen, held.gradients) for action, held in waiting.items()}
        assert found == {action: expected[action] for action in found}


def test_lookahead_makes_more_gradients_wait_and_frozen_stages_hold_all_they_send() -> None:
    def most(lookahead: int) -> int:
        program, _ = resolved("1f1b", 4, 1, 32, lookahead)
        steady = [Action(1, "B", microbatch) for microbatch in range(10, 20)]
        return max(waiting_sends(program)[1][action].gradients for action in steady)

    assert most(2) > most(0) > 0
    program, _ = resolved("1f1b", 2, 1, 32, 0)
    program = without_idle_backwards(program, [False, True])
    assert waiting_sends(program)[0][Action(0, "F", 31)] == (0, 31, 0)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_what_waits_is_part_of_a_situation(name: str) -> None:
    program, _ = resolved(name, 4, 2, 64, 0)
    for rank, waiting in waiting_sends(program).items():
        kept = without_repeats(program[rank], waiting)
        pairs = {(action.stage, action.kind, waiting[action]) for action in program[rank]}
        assert {(action.stage, action.kind, waiting[action]) for action in kept} == pairs
        assert len(kept) <= len(program[rank])
