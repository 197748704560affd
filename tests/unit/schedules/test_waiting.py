"""What waits to be known to have arrived follows from the program, as the runtime releases it."""

from __future__ import annotations

import pytest

from raypp.mesh.seating import place_stages
from raypp.pipeline.runtime import arrivals, lower
from raypp.schedules.action import Action, Program, without_idle_backwards
from raypp.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.schedules.posting import Posting
from raypp.schedules.waiting import waiting_sends, without_repeats
from raypp.torch_private import Computation

SENDS = (Computation.SEND_F, Computation.SEND_B)


def released(program: Program, rank_of: list[int], microbatches: int, posting: Posting) -> dict[str, tuple[int, int]]:
    """Returns the activations and gradients that the runtime holds as each action begins."""
    lowered, found = lower(program, rank_of, microbatches, posting), {}
    for rank, line in lowered.items():
        done, held = arrivals(lowered, rank, rank_of), []
        for position, action in enumerate(line):
            forward = sum(key[0] is Computation.SEND_F for key in held)
            found[str(action)] = forward, len(held) - forward
            if action.computation_type in SENDS:
                held.append((action.computation_type, action.stage_index, action.microbatch_index))
            for key in done.get(position, ()):
                held.remove(key)
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
