"""Relays merge the reports of many ranks; whatever fails, no report is lost and no answer is
wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control import hang_watch
from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.control.report.relay import Relay, Relays, relay_pace_s
from raypp.control.report.reporter import HEARTBEAT_S, ReportBuffer, ReportRoute
from raypp.records import Coordinates, Event, Requests, Seat

SEAT = Seat("run", 2, 1, 2, Coordinates(pp=1), Coordinates(2, 1, 1, 1))


class Controller:
    """Answers the batches of relays as the controller does, and can be away."""

    def __init__(self) -> None:
        self.calls: list[tuple[ReportBatch, ...]] = []
        self.answer = BatchAnswer(Requests(), "first")
        self.away = False

    async def relayed(self, batches: tuple[ReportBatch, ...]) -> list[BatchAnswer]:
        if self.away:
            raise ConnectionError("away")
        self.calls.append(batches)
        return [self.answer] * len(batches)

    def events(self) -> list[tuple[int, str]]:
        return [(batch.rank, event.message) for call in self.calls for batch in call for event in batch.events]


def batch(rank: int, number: int = 1, *texts: str, attempt: int = 2, idle_s: float = 0.0) -> ReportBatch:
    events = tuple(Event("told", text, attempt=attempt) for text in texts)
    return ReportBatch(attempt, rank, number, f"step {number}", idle_s, events=events)


class LocalRelay(Relay):
    """Calls a controller in its own process."""

    async def _send(self, batches: tuple[ReportBatch, ...]) -> Sequence[BatchAnswer]:
        answers: Sequence[BatchAnswer] = await self._controller.relayed(batches)
        return answers


class LocalRoute(ReportRoute):
    """Calls functions in place of actors."""

    def _answer(self, handle: Any, batch: ReportBatch, timeout_s: float) -> BatchAnswer:
        answer: BatchAnswer = handle(batch)
        return answer


class Way:
    """Takes some batches, and is away then. `asked` lists which way was asked to take which."""

    def __init__(self, name: str, asked: list[tuple[str, int]], takes: int = 99) -> None:
        self.name, self.asked, self.takes = name, asked, takes

    def __call__(self, report: ReportBatch) -> BatchAnswer:
        self.asked.append((self.name, report.number))
        self.takes -= 1
        if self.takes < 0:
            raise ConnectionError("away")
        return BatchAnswer(Requests(), "first")


def with_relay(scenario: Callable[[Relay, Controller], Coroutine[None, None, None]], heartbeat_s: float = 60.0) -> None:
    """Runs a relay during `scenario`."""

    async def both() -> None:
        controller = Controller()
        relay = LocalRelay("run", controller, heartbeat_s, timeout_s=0.2, flush_s=0.02)
        await asyncio.wait_for(scenario(relay, controller), 20)

    asyncio.run(both())


def test_simultaneous_batches_travel_in_few_calls_and_all_are_answered() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        answers = await asyncio.gather(*(relay.report(batch(rank, 1, f"e{rank}")) for rank in range(32)))
        assert [answer.incarnation for answer in answers] == ["first"] * 32
        assert sorted(controller.events()) == [(rank, f"e{rank}") for rank in range(32)]
        assert len(controller.calls) <= 2

    with_relay(scenario)


def test_heartbeats_are_answered_at_once_and_the_newest_of_each_rank_is_forwarded_with_its_age() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        await asyncio.gather(*(relay.report(batch(rank, 1)) for rank in range(20)))
        before = len(controller.calls)
        for number in (2, 3):
            for rank in range(20):
                await relay.report(batch(rank, number, idle_s=5.0))
        assert len(controller.calls) == before, "a heartbeat waited for the controller"
        while len(controller.calls) == before:
            await asyncio.sleep(0.01)
        (call,) = controller.calls[before:]
        assert [(one.rank, one.number, one.phase) for one in call] == [(rank, 3, "step 3") for rank in range(20)]
        idle = [one.idle_s for one in call]
        assert idle == sorted(idle, reverse=True) and idle[-1] >= 5.0, "who reported first is idle for longest"

    with_relay(scenario, heartbeat_s=0.3)


def test_a_heartbeat_overtakes_no_batch_of_its_rank() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        await relay.report(batch(0, 1))
        waits = asyncio.create_task(relay.report(batch(0, 2, "e")))
        await asyncio.sleep(0)
        await relay.report(batch(0, 3))
        await waits
        assert [one.number for one in controller.calls[-1]] == [2, 3]

    with_relay(scenario)


def test_the_operators_wish_and_what_is_in_the_store_come_back_to_each_rank() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        answers = await asyncio.gather(*(relay.report(batch(rank, 4, "e")) for rank in (0, 1)))
        assert [answer.durable for answer in answers] == [0, 0]
        controller.answer = BatchAnswer(Requests(stop=True, save_before_stop=True), "first", 4)
        while (answer := await relay.report(batch(0, 5))).durable == 0:
            await asyncio.sleep(0.01)
        assert (answer.durable, answer.requests.stop, answer.requests.save_before_stop) == (4, True, True)

    with_relay(scenario, heartbeat_s=0.05)


def test_what_one_attempt_is_asked_to_do_is_not_asked_of_the_next() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        controller.answer = BatchAnswer(Requests(stop=True), "first", 9)
        assert (await relay.report(batch(0, 9, "e"))).requests.stop
        controller.answer = BatchAnswer(Requests(), "first")
        answer = await relay.report(batch(0, 1, attempt=3))
        assert (answer.requests.stop, answer.durable) == (False, 0)
        assert (controller.calls[-1][-1].attempt, controller.calls[-1][-1].rank) == (3, 0)

    with_relay(scenario)


def test_when_nobody_takes_a_batch_the_rank_hears_so() -> None:
    async def scenario(relay: Relay, controller: Controller) -> None:
        await relay.report(batch(0, 1, "a"))
        await relay.report(batch(1, 1))
        controller.away = True
        await relay.report(batch(1, 2))  # the controller's word is not old yet
        with pytest.raises(ConnectionError):
            await relay.report(batch(0, 2, "b"))
        controller.away = False
        controller.answer = BatchAnswer(Requests(), "second")
        answer = await relay.report(batch(0, 3, "b"))
        assert answer.incarnation == "second" and controller.events() == [(0, "a"), (0, "b")]

    with_relay(scenario)


def test_a_rank_whose_relay_fails_tells_the_same_batch_directly_and_spares_the_relay_for_a_while() -> None:
    asked: list[tuple[str, int]] = []
    way = LocalRoute(Way("controller", asked), Way("relay", asked, takes=1), 1, 0.25)
    way.send(batch(1, 1))
    assert (way.pace_s, asked) == (HEARTBEAT_S, [("relay", 1)])
    way.send(batch(1, 2))
    way.send(batch(1, 3))
    assert asked[1:] == [("relay", 2), ("controller", 2), ("controller", 3)]
    assert way.pace_s == 0.25


def test_while_the_controller_is_away_the_relay_stays_the_first_way() -> None:
    asked: list[tuple[str, int]] = []
    way = LocalRoute(Way("controller", asked, takes=0), Way("relay", asked, takes=0), 1, 0.25)
    for number in (1, 2):
        with pytest.raises(ConnectionError):
            way.send(batch(1, number))
    assert asked == [("relay", 1), ("controller", 1), ("relay", 2), ("controller", 2)]


_MOVES = st.lists(
    st.sampled_from(["event", "relay", "relay dies", "relay dies later", "both die", "write", "die"]), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(_MOVES)
def test_whoever_dies_on_the_way_every_event_comes_into_the_store_and_no_life_takes_one_twice(moves: list[str]) -> None:
    buffer, count, stored = ReportBuffer(SEAT), 0, list[str]()
    life, taken, durable, last = 1, list[ReportBatch](), 0, 0
    move = ""

    def take(report: ReportBatch) -> BatchAnswer:
        nonlocal last
        if report.number > last:
            last = report.number
            taken.append(report)
        return BatchAnswer(Requests(), str(life), durable)

    def by_relay(report: ReportBatch) -> BatchAnswer:
        if move == "relay":
            return take(report)
        if move == "relay dies later":
            take(report)  # and cannot say so any more
        raise ConnectionError("gone")

    def directly(report: ReportBatch) -> BatchAnswer:
        if move == "both die":
            raise ConnectionError("away")
        return take(report)

    for move in [*moves, "relay", "relay dies", "write"]:
        if move == "event":
            buffer.add_event(Event("one", str(count)))
            count += 1
        elif move == "write":
            stored += [event.message for one in taken for event in one.events]
            durable = max([durable, *(one.number for one in taken)])
            taken.clear()
        elif move == "die":
            life, durable, last = life + 1, 0, 0
            taken.clear()
        else:
            next_batch = buffer.next_batch("step", 0.0)
            try:
                answer = LocalRoute(directly, by_relay, 1, 1.0).send(next_batch)
            except ConnectionError:
                buffer.requeue(next_batch)
            else:
                buffer.sent(next_batch, answer)
    if "die" not in moves:
        assert stored == [str(number) for number in range(count)]
    left = buffer.unwritten()
    for known in (set(stored), {*stored, *(event.message for event in (left.events if left else ()))}):
        assert sorted(known, key=int) == [str(number) for number in range(count)]


class _Started(Relays):
    """Notes the relays that it would start as actors."""

    def _start(self, node: str, relays: int) -> str:
        return f"of {relays} on {node}"


def test_small_runs_have_no_relays_and_large_ones_one_on_each_node() -> None:
    relays = _Started("run", None)
    relays.start(["a"] * 63)
    assert relays.of(0) is None
    relays.start(["a"] * 40 + ["b"] * 40)
    assert [relays.of(bundle) for bundle in (0, 39, 40, 79)] == ["of 2 on a"] * 2 + ["of 2 on b"] * 2
    assert _Started("run", None).of(5) is None


def test_many_relays_send_heartbeats_less_often_but_in_time_for_the_hang_watch() -> None:
    paces = [relay_pace_s(relays) for relays in (1, 50, 100, 125, 1000)]
    assert paces == [HEARTBEAT_S, HEARTBEAT_S, 2.0, 2.5, 2.5]
    assert HEARTBEAT_S + max(paces) < hang_watch._HEARTBEAT_DUE_S - 1.0
