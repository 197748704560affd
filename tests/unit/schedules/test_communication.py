"""Programs with messages neither hang nor mix up messages, under each library's strictest rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from raypp.mesh.stage_placement import place_stages
from raypp.schedules.catalogue import SCHEDULES, build_program, schedule_named, size_problems
from raypp.schedules.communication import Line, Message, Receive, Send, channels_of, needed_by, with_messages
from raypp.schedules.deadlock import find_hangs


def ranks_of(name: str, pp: int, stages_per_rank: int) -> list[int]:
    placement = place_stages(pp, pp * stages_per_rank, schedule_named(name).placement)
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return [holder[stage] for stage in range(pp * stages_per_rank)]


def lines_of(
    name: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int
) -> tuple[dict[int, Line], list[int]]:
    ranks = ranks_of(name, pp, stages_per_rank)
    return with_messages(build_program(name, pp, stages_per_rank, microbatches, lookahead), ranks), ranks


def sizes(name: str, widths: Sequence[int]) -> list[tuple[int, int, int]]:
    wanted = ((pp, v, m) for pp in widths for v in (1, 2, 3) for m in (pp, pp + 1, 2 * pp, 3 * pp + 1))
    return [size for size in wanted if not size_problems(schedule_named(name), *size)]


def assert_nothing_waits(name: str, widths: Sequence[int]) -> None:
    for pp, stages_per_rank, microbatches in sizes(name, widths):
        for lookahead in range(5):
            lines, ranks = lines_of(name, pp, stages_per_rank, microbatches, lookahead)
            for rule, room in (("gloo", 0), ("nccl", 0), ("blocking", schedule_named(name).buffered)):
                found = find_hangs(lines, ranks, rule, room=room)  # type: ignore[arg-type]
                assert not found, (pp, stages_per_rank, microbatches, lookahead, rule, found)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_no_schedule_hangs_at_any_lookahead_under_any_rule_on_few_ranks(name: str) -> None:
    assert_nothing_waits(name, (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_no_schedule_hangs_at_any_lookahead_under_any_rule_on_many_ranks(name: str) -> None:
    assert_nothing_waits(name, range(4, 9))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_message_is_sent_once_and_received_once_before_it_is_needed(name: str) -> None:
    for pp, stages_per_rank, microbatches in sizes(name, (2, 4)):
        lines, ranks = lines_of(name, pp, stages_per_rank, microbatches, 1)
        for line in lines.values():
            posted: set[Message] = set()
            for item in line:
                if isinstance(item, Receive):
                    assert item.message not in posted
                    posted.add(item.message)
                elif not isinstance(item, Send) and (needed := needed_by(item, ranks)) is not None:
                    posted.remove(needed)  # raises when it was not posted
            assert not posted
        sent = [item.message for line in lines.values() for item in line if isinstance(item, Send)]
        received = [item.message for line in lines.values() for item in line if isinstance(item, Receive)]
        assert sorted(map(str, sent)) == sorted(map(str, received)) and len(set(sent)) == len(sent)


def test_a_receive_is_posted_a_backward_and_a_forward_before_its_use() -> None:
    # With torch's placement, rank 0 posts the receive of a gradient one forward before it needs it.
    lines, _ = lines_of("1f1b", 2, 1, 16, 1)
    line = lines[0]
    for microbatch in range(4, 16):
        posted = line.index(Receive(Message("B", 1, microbatch)))
        used = next(i for i, item in enumerate(line) if str(item) == f"0B{microbatch}")
        between = [str(item)[1] for item in line[posted:used] if not isinstance(item, Send | Receive)]
        assert between.count("B") >= 2


def test_one_group_for_all_activations_would_hang_nccl() -> None:
    # Two ranks with two stages each send activations both ways. In a single group, a posted receive
    # blocks the send behind it.
    lines, ranks = lines_of("interleaved_1f1b", 2, 2, 4, 0)
    assert find_hangs(lines, ranks, "nccl", group_of=lambda message, source, to: message.kind)
    assert not find_hangs(lines, ranks, "nccl")


def test_a_receive_out_of_order_is_found() -> None:
    lines, ranks = lines_of("1f1b", 2, 1, 4, 0)
    first, second = (Receive(Message("F", 0, index)) for index in (0, 1))
    swap = {first: second, second: first}
    lines[1] = [swap.get(item, item) if isinstance(item, Receive) else item for item in lines[1]]
    assert any("matches" in text for text in find_hangs(lines, ranks, "gloo"))


def test_a_receive_that_is_never_posted_is_found() -> None:
    lines, ranks = lines_of("1f1b", 3, 1, 4, 1)
    lost = Receive(dataclasses.replace(Message("B", 2, 0), microbatch=3))
    lines[1] = [item for item in lines[1] if item != lost]
    assert "rank 1 hangs at 1B3" in find_hangs(lines, ranks, "gloo")


def test_channels_are_connected_neighbours_first() -> None:
    assert channels_of([0, 1, 2, 3]) == [(0, 1), (2, 1), (2, 3), (1, 0), (1, 2), (3, 2)]
    assert channels_of([0, 0]) == []
    assert set(channels_of([0, 1, 2, 0, 1, 2])) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
