"""The turns in which channels are timed: no card carries two messages in one direction."""

import pytest

from raypp.planning.schedules.communication import channels_of
from raypp.planning.seating import place_stages
from raypp.stages.pipeline.link_probe import turns_of


@pytest.mark.parametrize(
    ("pp", "each", "placement", "most"),
    [(2, 1, "loop", 1), (4, 1, "loop", 2), (8, 1, "loop", 2), (4, 2, "loop", 3), (3, 3, "loop", 3), (4, 2, "v", 2)],
)
def test_each_channel_has_one_turn_and_shares_it_with_no_other_of_its_ranks(
    pp: int, each: int, placement: str, most: int
) -> None:
    stages = place_stages(pp, pp * each, placement)  # type: ignore[arg-type]
    holder = {stage: rank for rank, held in enumerate(stages) for stage in held}
    channels = channels_of([holder[stage] for stage in range(pp * each)])
    turns = turns_of(channels)
    assert sorted(channel for turn in turns for channel in turn) == sorted(channels)
    assert len(turns) <= most
    for turn in turns:
        senders, receivers = zip(*turn, strict=True)
        assert len(set(senders)) == len(set(receivers)) == len(turn)


def test_a_turn_keeps_the_order_in_which_channels_connect_safely() -> None:
    channels = channels_of(range(6))
    assert all(turn == [channel for channel in channels if channel in turn] for turn in turns_of(channels))
