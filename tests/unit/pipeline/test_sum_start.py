"""When sums over replicas begin: never while the rank still has a gradient to send."""

import pytest

from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.seating import place_stages
from raypp.stages.pipeline.runtime import lower
from raypp.stages.pipeline.wire import SumStart, sum_start
from raypp.torch_private import Computation, LoweredAction

MICROBATCHES = 8
SENDS = (Computation.SEND_F, Computation.SEND_B)


def decided(name: str, ranks: int) -> list[tuple[list[LoweredAction], set[int], SumStart]]:
    kind = schedule_named(name)
    each = kind.nearest_stages(2) if name != "1f1b" else 1
    placed = place_stages(ranks, ranks * each, kind.placement)
    holder = {stage: rank for rank, stages in enumerate(placed) for stage in stages}
    program = build_program(name, ranks, each, MICROBATCHES, 0)
    lowered = lower(program, [holder[s] for s in range(ranks * each)], MICROBATCHES, "ahead")
    return [(lowered[rank], set(stages), sum_start(lowered[rank], stages)) for rank, stages in enumerate(placed)]


def test_in_1f1b_only_the_first_stage_sums_within_its_last_backward() -> None:
    first, *others = [start for _, _, start in decided("1f1b", 4)]
    assert first.held == frozenset()
    for stage, start in enumerate(others, 1):
        assert start.held == {stage}
        assert start.waits, "nothing is left to compute when the last gradient leaves"


def test_without_a_pipeline_nothing_is_held() -> None:
    ((_, _, start),) = decided("1f1b", 1)
    assert start == SumStart(frozenset(), -1, waits=False)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_stage_is_held_exactly_if_its_rank_sends_after_the_stages_last_action(name: str, ranks: int) -> None:
    for actions, stages, start in decided(name, ranks):
        sends = [position for position, action in enumerate(actions) if action.computation_type in SENDS]
        assert start.last_send == sends[-1]
        computes = [
            (position, action.stage_index)
            for position, action in enumerate(actions)
            if action.computation_type
            in (Computation.FORWARD, Computation.FULL_BACKWARD, Computation.BACKWARD_INPUT, Computation.BACKWARD_WEIGHT)
        ]
        for stage in stages:
            end = max(position for position, of in computes if of == stage)
            assert (stage in start.held) == (end < sends[-1])
        assert start.waits == (computes[-1][0] < sends[-1])
