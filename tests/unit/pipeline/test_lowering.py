"""The runtime's actions keep the order in which a program's messages are proven not to hang."""

import pytest

from raypp.planning.schedules.action import Action
from raypp.planning.schedules.catalogue import SCHEDULES, build_program, schedule_named
from raypp.planning.schedules.communication import Receive
from raypp.planning.schedules.posting import Posting, with_messages
from raypp.planning.seating import place_stages
from raypp.stages.pipeline.runtime import lower
from raypp.torch_private import Computation

WEIGHTS = (Computation.UNSHARD, Computation.RESHARD, Computation.REDUCE_GRAD)


@pytest.mark.parametrize("posting", ["ahead", "one_order"])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_torchs_passes_change_no_order(name: str, posting: Posting) -> None:
    kind = schedule_named(name)
    each = kind.nearest_stages(2)
    holder = {s: rank for rank, stages in enumerate(place_stages(4, 4 * each, kind.placement)) for s in stages}
    ranks = [holder[stage] for stage in range(4 * each)]
    program = build_program(name, 4, each, 8, 1)
    lowered = lower(program, ranks, 8, posting)
    for rank, line in with_messages(program, ranks, posting).items():
        expected = []
        for item in line:
            if isinstance(item, Action):
                expected.append(str(item))
            elif isinstance(item, Receive):
                expected.append(f"{item.message.to_stage}RECV_{item.message.kind}{item.message.microbatch}")
            else:
                expected.append(f"{item.message.stage}SEND_{item.message.kind}{item.message.microbatch}")
        assert [str(a) for a in lowered[rank] if a.computation_type not in WEIGHTS] == expected
