"""Programs of stages that train nothing: no backward without need, and no message without a use."""

from itertools import product

import pytest
from deadlock import find_hangs

from raypp.planning.schedules.action import Program, printed, stages_with_backward, without_idle_backwards
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.communication import Send
from raypp.planning.schedules.posting import with_messages
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.planning.seating import place_stages

PP = 2
MICROBATCHES = 8


def program_of(name: str) -> tuple[Program, list[int]]:
    stages = schedule_named(name).nearest_stages(2)
    placement = place_stages(PP, PP * stages, schedule_named(name).placement)
    holder = {stage: rank for rank, held in enumerate(placement) for stage in held}
    return build_program(name, PP, stages, MICROBATCHES, 0), [holder[stage] for stage in range(len(holder))]


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_any_stages_may_train_nothing(name: str) -> None:
    program, ranks = program_of(name)
    whole = simulate(program, StageTimes.equal(len(ranks)))
    for trained in product((False, True), repeat=len(ranks)):
        if not any(trained):
            continue
        lean = without_idle_backwards(program, trained)
        if all(trained):
            assert lean is program
            continue
        lowest = trained.index(True)
        assert stages_with_backward(lean) == set(range(lowest, len(ranks)))
        kinds = {(a.stage, a.kind) for line in lean.values() for a in line}
        assert not any((stage, "W") in kinds for stage, trains in enumerate(trained) if not trains)
        assert lowest == 0 or (lowest, "I") not in kinds, "no one needs the gradient of its input"
        backwards = [a for line in lean.values() for a in line if a.kind in ("B", "I")]
        assert len(backwards) == MICROBATCHES * (len(ranks) - lowest)
        for posting in ("ahead", "one_order"):
            lines = with_messages(lean, ranks, posting)  # type: ignore[arg-type]
            sent = [item.message for line in lines.values() for item in line if isinstance(item, Send)]
            assert not any(message.kind == "B" and message.to_stage < lowest for message in sent)
            assert not find_hangs(lines, ranks, "gloo" if posting == "ahead" else "nccl")
        # Where nothing is trained, a backward has one half; so has the lowest one.
        halved = [1.0 if not trains or stage == lowest > 0 else 2.0 for stage, trains in enumerate(trained)]
        lean_times = simulate(lean, StageTimes([1.0] * len(ranks), halved))
        assert lean_times.makespan <= whole.makespan
        assert all(lean_times.in_flight[stage] == 0 for stage in range(lowest))


def test_the_backward_ends_at_the_lowest_stage_that_trains() -> None:
    program, _ = program_of("interleaved_zero_bubble")
    lean = without_idle_backwards(program, (False, True, False, True))
    assert " 0I" not in printed(lean[0]) and "2W" not in printed(lean[0]) and "2B0" in printed(lean[0])
    assert "1B0" in printed(lean[1]) and "1W" not in printed(lean[1])
    assert "3I0" in printed(lean[1]) and "3W0" in printed(lean[1])
