"""Programs with messages neither hang nor mix up messages, under each library's strictest rules."""

import random
from collections.abc import Sequence

import pytest
from deadlock import Rule, find_hangs
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.receives_on_paper import held
from raypp.planning.schedules.action import Action, Program
from raypp.planning.schedules.catalogue import (
    SCHEDULES,
    build_forward_only,
    build_program,
    schedule_named,
    size_problems,
)
from raypp.planning.schedules.communication import Line, Message, Receive, Send, channels_of, needed_by
from raypp.planning.schedules.posting import Posting, posting_on, with_messages
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.planning.seating import place_stages

Size = tuple[int, int, int]


def ranks_of(placement: Sequence[Sequence[int]]) -> list[int]:
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return [holder[stage] for stage in range(len(holder))]


def program_of(
    name: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int
) -> tuple[Program, list[int]]:
    placement = place_stages(pp, pp * stages_per_rank, schedule_named(name).placement)
    return build_program(name, pp, stages_per_rank, microbatches, lookahead), ranks_of(placement)


def lines_of(
    name: str, pp: int, stages_per_rank: int, microbatches: int, lookahead: int, posting: Posting = "ahead"
) -> tuple[dict[int, Line], list[int]]:
    program, ranks = program_of(name, pp, stages_per_rank, microbatches, lookahead)
    return with_messages(program, ranks, posting), ranks


def sizes(name: str, widths: Sequence[int], most: int = 0) -> list[Size]:
    wanted = (
        (pp, v, m) for pp in widths for v in (1, 2, 3) for m in (pp, pp + 1, 2 * pp, 3 * pp - 1, most or 3 * pp + 1)
    )
    return [size for size in wanted if not size_problems(schedule_named(name), *size)]


def assert_nothing_waits(lines: dict[int, Line], ranks: Sequence[int], rules: Sequence[Rule], room: int = 0) -> None:
    for rule in rules:
        found = find_hangs(lines, ranks, rule, room=room)
        assert not found, (rule, found)


def held_messages(name: str, pp: int, microbatches: int, lookahead: int = 0) -> int:
    """Returns how many messages each channel must hold if sends block until they are received.
    Breadth first, the microbatches are spread over the ring's channels, and receives take two of
    each. Else messages wait if a rank has several stages: at most `lookahead` if it splits
    backwards; if not, as many as a round has microbatches beyond one per rank."""
    schedule = schedule_named(name)
    if name == "looped_bfs":
        return max(0, microbatches // pp - 2)
    if schedule.stages_per_rank[1] == 1 or schedule.splits_backward:
        return lookahead if schedule.stages_per_rank[1] > 1 else 0
    rounds = max(1, microbatches // (pp + (pp * lookahead + 1) // 2))
    return max(0, -(-microbatches // rounds) - pp)


def assert_gloo_never_waits(name: str, sizes: Sequence[Size], lookaheads: Sequence[int] = range(5)) -> None:
    for size in sizes:
        for lookahead in lookaheads:
            held = held_messages(name, size[0], size[2], lookahead)
            lines, ranks = lines_of(name, *size, lookahead, "ahead")
            assert_nothing_waits(lines, ranks, ("gloo", "blocking"), held)


def assert_nccl_never_waits(name: str, sizes: Sequence[Size], lookaheads: Sequence[int] = range(5)) -> None:
    for size in sizes:
        for lookahead in lookaheads:
            lines, ranks = lines_of(name, *size, lookahead, "one_order")
            assert_nothing_waits(lines, ranks, ("nccl", "gloo", "blocking"))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_no_schedule_hangs_at_any_lookahead_on_few_ranks(name: str) -> None:
    assert_gloo_never_waits(name, sizes(name, (2, 3)))
    assert_nccl_never_waits(name, sizes(name, (2, 3)), (0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_no_schedule_hangs_at_any_lookahead_on_many_ranks(name: str, pp: int) -> None:
    assert_gloo_never_waits(name, sizes(name, [pp], most=32))
    assert_nccl_never_waits(name, sizes(name, [pp], most=32))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 32), (3, 31), (4, 64), (8, 32)])
def test_breadth_first_a_channel_holds_the_microbatches_of_a_rank(pp: int, microbatches: int) -> None:
    held = held_messages("looped_bfs", pp, microbatches)
    for stages_per_rank in (2, 3):
        lines, ranks = lines_of("looped_bfs", pp, stages_per_rank, microbatches, 0)
        assert_nothing_waits(lines, ranks, ("gloo", "blocking"), held)
        assert find_hangs(lines, ranks, "blocking", room=held - 1), "one message less hangs"


def test_an_evaluation_does_not_hang() -> None:
    for pp, stages_per_rank, placement in ((2, 1, "loop"), (4, 2, "loop"), (3, 2, "v")):
        program = build_forward_only(pp, stages_per_rank, 7, placement)  # type: ignore[arg-type]
        ranks = ranks_of(place_stages(pp, pp * stages_per_rank, placement))  # type: ignore[arg-type]
        assert_nothing_waits(with_messages(program, ranks, "one_order"), ranks, ("nccl", "gloo", "blocking"))


def has_input(action: Action, done: set[Action], stages: int) -> bool:
    """Returns whether the action of the other stage whose result an action takes has run."""
    stage, kind, microbatch = action
    from_stage = stage - 1 if kind == "F" else stage + 1
    return not 0 <= from_stage < stages or Action(from_stage, kind, microbatch) in done


def any_program(pp: int, stages: int, microbatches: int, seed: int) -> tuple[Program, list[int]]:
    """Returns a random valid program: any placement, any order that can run."""
    draw = random.Random(seed)
    ranks = [*range(pp), *(draw.randrange(pp) for _ in range(stages - pp))]
    draw.shuffle(ranks)
    program: dict[int, list[Action]] = {rank: [] for rank in range(pp)}
    # The actions of a stage: forwards and backwards each in order, a backward after its forward.
    todo = {(stage, kind): 0 for stage in range(stages) for kind in "FB"}
    done: set[Action] = set()
    while open_ends := [
        action
        for (stage, kind), index in todo.items()
        if index < microbatches and (kind == "F" or index < todo[stage, "F"])
        if has_input(action := Action(stage, kind, index), done, stages)  # type: ignore[arg-type]
    ]:
        action = draw.choice(open_ends)
        todo[action.stage, action.kind] += 1
        done.add(action)
        program[ranks[action.stage]].append(action)
    return program, ranks


@settings(max_examples=25, deadline=None)
@given(pp=st.integers(2, 8), more=st.integers(0, 8), microbatches=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_no_program_at_all_hangs_when_receives_are_posted_in_one_order(
    pp: int, more: int, microbatches: int, seed: int
) -> None:
    program, ranks = any_program(pp, pp + more, microbatches, seed)
    lines = with_messages(program, ranks, "one_order")
    assert_nothing_waits(lines, ranks, ("nccl", "gloo", "blocking"))
    assert not find_hangs(lines, ranks, "nccl", group_of=lambda *message: "the only one")


@settings(max_examples=25, deadline=None)
@given(pp=st.integers(2, 8), more=st.integers(0, 8), microbatches=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_no_program_hangs_when_a_receive_waits_until_its_rank_comes_to_the_action_before(
    pp: int, more: int, microbatches: int, seed: int
) -> None:
    program, ranks = any_program(pp, pp + more, microbatches, seed)
    lines = with_messages(program, ranks, "one_order")
    assert_nothing_waits(earlier(lines), ranks, ("queues",))


@pytest.mark.parametrize(("name", "most"), [("1f1b", 1.45), ("zbv", 1.1)])
def test_fewer_receives_hold_processors_if_they_wait_for_the_action_before(name: str, most: float) -> None:
    program, ranks = program_of(name, 4, schedule_named(name).nearest_stages(2), 16, 0)
    at_once, held_back = (max(held(program, ranks, 0.5, ahead)) for ahead in (4, None))
    assert at_once > 1.7 and held_back < most
    times = StageTimes.equal(len(ranks), link=0.5)
    lines = with_messages(program, ranks, "one_order")
    assert simulate(program, times, earlier(lines)).makespan == simulate(program, times).makespan


def earlier(lines: dict[int, Line]) -> dict[int, Line]:
    """Returns lines whose receives are before the action that they followed: there, the runtime's
    begin."""
    moved: dict[int, Line] = {}
    for rank, line in lines.items():
        kept: Line = []
        for item in line:
            last = max((index for index, one in enumerate(kept) if isinstance(one, Action)), default=len(kept))
            kept.insert(last if isinstance(item, Receive) else len(kept), item)
        moved[rank] = kept
    return moved


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_receives_posted_ahead_hang_nccl_where_a_rank_waits_for_all_it_has_posted(name: str) -> None:
    lines, ranks = lines_of(name, 4, schedule_named(name).stages_per_rank[0], 16, 1)
    assert any("hangs at" in text for text in find_hangs(lines, ranks, "nccl"))


def test_the_backend_decides_how_receives_are_posted() -> None:
    assert (posting_on("cuda"), posting_on("cpu")) == ("one_order", "ahead")


@pytest.mark.parametrize("gradient_early", [True, False])
@pytest.mark.parametrize("activation_early", [True, False])
def test_of_two_messages_that_cross_only_one_can_be_awaited_early(gradient_early: bool, activation_early: bool) -> None:
    # 0F1 and 1B0 run at the same time. Each rank could post its receive before or after its own.
    activation, gradient = Message("F", 0, 1), Message("B", 1, 0)
    first, last = Message("F", 0, 0), Message("B", 1, 1)
    forward, backward = [Action(0, "F", 1), Send(activation)], [Action(1, "B", 0), Send(gradient)]
    upper: Line = [Receive(gradient), *forward] if gradient_early else [*forward, Receive(gradient)]
    lower: Line = [Receive(activation), *backward] if activation_early else [*backward, Receive(activation)]
    lines: dict[int, Line] = {
        0: [Action(0, "F", 0), Send(first), *upper, Action(0, "B", 0), Receive(last), Action(0, "B", 1)],
        1: [Receive(first), Action(1, "F", 0), *lower, Action(1, "F", 1), Action(1, "B", 1), Send(last)],
    }
    assert bool(find_hangs(lines, [0, 1], "nccl")) is (gradient_early is activation_early)


def one_order_costs(name: str, lookahead: int, link: float) -> float:
    """Returns by what fraction a step on four ranks is longer because of late receives."""
    program, ranks = program_of(name, 4, schedule_named(name).nearest_stages(2), 16, lookahead)
    times, lines = StageTimes.equal(len(ranks), link=link), with_messages(program, ranks, "one_order")
    return simulate(program, times, lines).makespan / simulate(program, times).makespan - 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "looped_bfs"])
def test_one_order_of_one_stage_at_a_time_costs_nothing(name: str) -> None:
    for lookahead in (0, 1, 2):
        assert all(one_order_costs(name, lookahead, link) == 0 for link in (0.0, 0.25, 0.5, 1.0, 2.0))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_one_order_costs_next_to_nothing_on_the_links_that_a_program_is_made_for(name: str) -> None:
    assert all(one_order_costs(name, 0, link) < 0.005 for link in (0.0, 0.25, 0.5, 1.0))
    for lookahead in (1, 2):
        assert all(one_order_costs(name, lookahead, link) <= 0.01 for link in (0.0, 0.25, 0.5, 1.0))
        assert one_order_costs(name, lookahead, 2.0) < 0.03


def test_a_receive_posted_late_delays_its_message_in_the_simulation() -> None:
    program, ranks = program_of("gpipe", 2, 1, 2, 0)
    times = StageTimes.equal(2, forward=1.0, backward=2.0, link=0.5)
    lines = with_messages(program, ranks, "one_order")
    used = lines[1].index(Action(1, "F", 1))
    posted = lines[1].index(Receive(Message("F", 0, 1)))
    assert posted < lines[1].index(Action(1, "F", 0))
    late = [*lines[1][:posted], *lines[1][posted + 1 : used], lines[1][posted], *lines[1][used:]]
    # Posted at 2.5, when its first forward ends; without a delay it would have arrived at 2.5.
    assert simulate(program, times, lines).makespan == simulate(program, times).makespan
    assert simulate(program, times, {**lines, 1: late}).makespan == simulate(program, times).makespan + 0.5


@pytest.mark.parametrize("posting", ["ahead", "one_order"])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_message_is_sent_once_and_received_once_before_it_is_needed(name: str, posting: Posting) -> None:
    for pp, stages_per_rank, microbatches in sizes(name, (2, 4)):
        lines, ranks = lines_of(name, pp, stages_per_rank, microbatches, 1, posting)
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


def test_a_receive_out_of_order_is_found() -> None:
    lines, ranks = lines_of("1f1b", 2, 1, 4, 0)
    first, second = (Receive(Message("F", 0, index)) for index in (0, 1))
    swap = {first: second, second: first}
    lines[1] = [swap.get(item, item) if isinstance(item, Receive) else item for item in lines[1]]
    assert any("matches" in text for text in find_hangs(lines, ranks, "gloo"))


def test_a_receive_that_is_never_posted_is_found() -> None:
    lines, ranks = lines_of("1f1b", 3, 1, 4, 1)
    lost = Receive(Message("B", 2, 3))
    lines[1] = [item for item in lines[1] if item != lost]
    assert "rank 1 hangs at 1B3" in find_hangs(lines, ranks, "gloo")


def test_channels_are_connected_neighbours_first() -> None:
    assert channels_of([0, 1, 2, 3]) == [(0, 1), (2, 1), (2, 3), (1, 0), (1, 2), (3, 2)]
    assert channels_of([0, 0]) == []
    assert set(channels_of([0, 1, 2, 0, 1, 2])) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}


def test_a_message_that_is_needed_first_and_sent_last_is_posted_with_all_before_it() -> None:
    """A user's own schedule may take microbatches in another order than they are sent."""
    microbatches = range(6)
    program = {
        0: [Action(0, "F", m) for m in microbatches] + [Action(0, "B", m) for m in reversed(microbatches)],
        1: [Action(1, kind, m) for m in reversed(microbatches) for kind in ("F", "B")],
    }
    lines = with_messages(program, [0, 1], "ahead")
    received = [Receive(Message("F", 0, m)) for m in microbatches]
    assert lines[1][: len(received) + 1] == [*received, Action(1, "F", 5)]
    assert_nothing_waits(lines, [0, 1], ("gloo",))
