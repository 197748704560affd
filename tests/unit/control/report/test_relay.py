"""Relays merge what many ranks tell, and whatever fails on the way, nothing is lost and nobody is misled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control.protocol import Answer, Batch, Beat, Parcel, Word
from raypp.control.report.outbox import Outbox
from raypp.control.report.relay import BEATS_S, Carrier, Sorting, Way
from raypp.control.report.relay_tree import Plan, Shape, is_relay
from raypp.records import Coordinates, Event, Requests, Seat

SEAT = Seat("run", 2, 1, 2, Coordinates(pp=1), Coordinates(2, 1, 1, 1))


class Controller:
    """Takes parcels as the controller does, and is there or not."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.word = Word("life-1", 2, Requests())
        self.away = False

    async def relay(self, parcel: Parcel) -> Word:
        if self.away:
            raise ConnectionError("away")
        self.parcels.append(parcel)
        durable = {rank: number for rank, number in self.word.durable.items() if rank in parcel.unwritten}
        return replace(self.word, durable=durable)

    def told(self) -> list[tuple[int, str]]:
        return [(batch.rank, event.message) for one in self.parcels for batch in one.batches for event in batch.events]


def batch(rank: int, number: int = 1, *events: str, attempt: int = 2, idle_s: float = 0.0) -> Batch:
    told = tuple(Event("told", text, attempt=attempt) for text in events)
    return Batch(attempt, rank, number, f"step {number}", idle_s, events=told)


def lead(
    talk: Callable[[Sorting, Controller], Coroutine[None, None, None]], *above: Carrier, beats_s: float = 60.0
) -> None:
    """Lets a relay work while `talk` lasts."""

    async def both() -> None:
        controller = Controller()
        carriers = [*((carrier, 0.2) for carrier in above), (controller.relay, 0.2)]
        sorting = Sorting(carriers, news_s=0.02, beats_s=beats_s)
        working = asyncio.create_task(sorting.hand_on())
        try:
            await asyncio.wait_for(talk(sorting, controller), 20)
        finally:
            working.cancel()

    asyncio.run(both())


def test_what_many_ranks_tell_at_once_comes_in_few_parcels_and_all_are_answered() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        answers = await asyncio.gather(*(sorting.report(batch(rank, 1, f"e{rank}")) for rank in range(32)))
        assert [answer.life for answer in answers] == ["life-1"] * 32
        assert sorted(controller.told()) == [(rank, f"e{rank}") for rank in range(32)]
        assert len(controller.parcels) <= 2
        beats = [beat.rank for parcel in controller.parcels for beat in parcel.beats]
        assert sorted(beats) == list(range(32))

    lead(talk)


def test_signs_of_life_are_answered_at_once_and_handed_on_together_with_their_age() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        await sorting.report(batch(0, 1))  # the first word has to come from the controller
        before = len(controller.parcels)
        for number in (2, 3):
            for rank in range(20):
                await sorting.report(batch(rank, number, idle_s=float(rank)))
        assert len(controller.parcels) == before, "a sign of life waited for the controller"
        await asyncio.sleep(0.45)
        assert len(controller.parcels) == before + 1
        parcel = controller.parcels[-1]
        assert [(beat.rank, beat.phase, beat.idle_s) for beat in parcel.beats] == [
            (rank, "step 3", float(rank)) for rank in range(20)
        ]
        assert parcel.batches == () and all(0.05 < beat.ago_s < 5 for beat in parcel.beats)

    lead(talk, beats_s=0.3)


def test_ages_add_up_from_one_relay_to_the_next() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        await sorting.take(Parcel(2, (Beat(7, "step 1", 1.0, ago_s=30.0),), (batch(7, 1, "e"),)))
        (beat,) = controller.parcels[-1].beats
        assert beat.idle_s == 1.0 and 30.0 <= beat.ago_s < 35.0

    lead(talk)


def test_the_operators_wish_and_what_is_in_the_store_come_back_to_each_rank() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        answers = await asyncio.gather(*(sorting.report(batch(rank, 4, "e")) for rank in (0, 1)))
        assert [answer.durable for answer in answers] == [0, 0]
        controller.word = Word("life-1", 2, Requests(stop=True, save_before_stop=True), {0: 4, 1: 4})
        await sorting.report(batch(2, 1, "another"))
        for rank in (0, 1):
            answer = await sorting.report(batch(rank, 5))
            assert (answer.durable, answer.requests.stop, answer.requests.save_before_stop) == (4, True, True)
        await sorting.report(batch(3, 1, "last"))
        assert set(controller.parcels[-1].unwritten) == {2, 3}, "what is written is asked for no more"

    lead(talk)


def test_what_one_attempt_is_asked_to_do_is_not_asked_of_the_next() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        controller.word = Word("life-1", 2, Requests(stop=True), {0: 9})
        assert (await sorting.report(batch(0, 9, "e"))).requests.stop
        answer = await sorting.report(batch(0, 1, attempt=3))
        assert (answer.requests.stop, answer.durable) == (False, 0)
        controller.word = Word("life-1", 3, Requests())
        await sorting.report(batch(1, 1, "e", attempt=3))
        assert controller.parcels[-1].attempt == 3
        assert [beat.rank for beat in controller.parcels[-1].beats] == [0, 1]

    lead(talk)


def test_when_the_relay_above_is_frozen_or_dead_the_controller_is_told_itself() -> None:
    asked: list[Parcel] = []

    async def frozen(parcel: Parcel) -> Word:
        asked.append(parcel)
        await asyncio.Event().wait()
        raise AssertionError

    async def talk(sorting: Sorting, controller: Controller) -> None:
        await sorting.report(batch(0, 1, "a"))
        begun = time.monotonic()
        await sorting.report(batch(0, 2, "b"))
        assert time.monotonic() - begun < 0.2, "a way that did not lead on was tried again at once"
        assert controller.told() == [(0, "a"), (0, "b")] and len(asked) == 1

    lead(talk, frozen)


def test_when_nobody_takes_a_batch_the_rank_hears_so_and_signs_of_life_are_kept() -> None:
    async def talk(sorting: Sorting, controller: Controller) -> None:
        await sorting.report(batch(0, 1, "a"))
        controller.away = True
        await sorting.report(batch(1, 1))  # the controller's word is not old yet
        with pytest.raises(ConnectionError):
            await sorting.report(batch(0, 2, "b"))
        controller.away = False
        controller.word = Word("life-2", 2)
        answer = await sorting.report(batch(0, 3, "b"))
        assert answer.life == "life-2" and controller.told() == [(0, "a"), (0, "b")]
        assert {beat.rank for beat in controller.parcels[-1].beats} == {0, 1}

    lead(talk)


def test_two_levels_bring_all_of_it_in_the_calls_of_one() -> None:
    async def both() -> None:
        controller = Controller()
        top = Sorting([(controller.relay, 1.0)], news_s=0.1)

        def carried(relay: Sorting) -> Callable[[Parcel], Awaitable[Word]]:
            return relay.take

        lows = [Sorting([(carried(top), 1.0), (controller.relay, 1.0)], news_s=0.05) for _ in range(8)]
        working = [asyncio.create_task(one.hand_on()) for one in (top, *lows)]
        told = [lows[rank % 8].report(batch(rank, 1, f"e{rank}")) for rank in range(64)]
        await asyncio.gather(*told)
        assert sorted(controller.told()) == [(rank, f"e{rank}") for rank in range(64)]
        assert len(controller.parcels) <= 3
        controller.word = replace(controller.word, durable=dict.fromkeys(range(64), 1))
        await asyncio.gather(*(lows[rank % 8].report(batch(rank, 2, "more")) for rank in range(64)))
        answers = await asyncio.gather(*(lows[rank % 8].report(batch(rank, 3)) for rank in range(64)))
        assert [answer.durable for answer in answers] == [1] * 64
        for task in working:
            task.cancel()

    asyncio.run(both())


def test_a_rank_whose_relay_fails_tells_the_same_batch_directly_and_spares_the_relay_for_a_while() -> None:
    direct: list[Batch] = []
    relayed: list[Batch] = []

    def to_controller(told: Batch) -> Answer:
        direct.append(told)
        return Answer(Requests(), "life-1")

    def to_relay(told: Batch) -> Answer:
        relayed.append(told)
        if len(relayed) > 1:
            raise ConnectionError("gone")
        return Answer(Requests(), "life-1")

    way = Way(to_controller, to_relay, 0.25)
    way.hand_over(batch(1, 1))
    assert (way.pace_s, direct) == (BEATS_S, [])
    way.hand_over(batch(1, 2))
    way.hand_over(batch(1, 3))
    assert [one.number for one in direct] == [2, 3] and [one.number for one in relayed] == [1, 2]
    assert way.pace_s == 0.25


def test_while_the_controller_is_away_the_relay_stays_the_first_way() -> None:
    asked: list[str] = []

    def to_controller(told: Batch) -> Answer:
        asked.append("controller")
        raise ConnectionError("away")

    def to_relay(told: Batch) -> Answer:
        asked.append("relay")
        raise ConnectionError("the controller does not answer")

    way = Way(to_controller, to_relay, 0.25)
    for number in (1, 2):
        with pytest.raises(ConnectionError):
            way.hand_over(batch(1, number))
    assert asked == ["relay", "controller", "relay", "controller"]


_MOVES = st.lists(
    st.sampled_from(["event", "relay", "relay dies", "relay dies later", "both die", "write", "die"]), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(_MOVES)
def test_whoever_dies_on_the_way_every_event_comes_into_the_store_and_no_life_takes_one_twice(moves: list[str]) -> None:
    outbox, told, stored = Outbox(SEAT), 0, list[str]()
    life, taken, durable, last = 1, list[Batch](), 0, 0
    move = ""

    def take(told: Batch) -> Answer:
        nonlocal last
        if told.number > last:
            last = told.number
            taken.append(told)
        return Answer(Requests(), str(life), durable)

    def by_relay(told: Batch) -> Answer:
        if move == "relay":
            return take(told)
        if move == "relay dies later":
            take(told)  # and cannot say so any more
        raise ConnectionError("gone")

    def directly(told: Batch) -> Answer:
        if move == "both die":
            raise ConnectionError("away")
        return take(told)

    for move in [*moves, "relay", "relay dies", "write"]:
        if move == "event":
            outbox.add_event(Event("one", str(told)))
            told += 1
        elif move == "write":
            stored += [event.message for one in taken for event in one.events]
            durable = max([durable, *(one.number for one in taken)])
            taken.clear()
        elif move == "die":
            life, durable, last = life + 1, 0, 0
            taken.clear()
        else:
            next_batch = outbox.take("step", 0.0)
            try:
                answer = Way(directly, by_relay, 1.0).hand_over(next_batch)
            except ConnectionError:
                outbox.returned(next_batch)
            else:
                outbox.delivered(next_batch, answer)
    if "die" not in moves:
        assert stored == [str(number) for number in range(told)]
    assert sorted(set(stored), key=int) == [str(number) for number in range(told)]


def test_small_runs_have_no_relays_and_large_ones_few_callers() -> None:
    assert Plan.of(["a"] * 63, Shape()) is None
    nodes = [f"n{bundle // 8}" for bundle in range(1000)]
    plan = Plan.of(nodes, Shape())
    assert plan is not None and [len(level) for level in plan.levels] == [32, 1]
    for number in range(32):
        share = [nodes[bundle] for bundle in range(1000) if plan.relay_of[bundle] == number]
        assert len(share) <= 32 and plan.levels[0][number] in share
    plan = Plan.of([f"n{bundle // 8}" for bundle in range(10_000)], Shape())
    assert plan is not None and [len(level) for level in plan.levels] == [313, 5]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=80),
    st.integers(1, 9),
    st.integers(2, 5),
    st.integers(1, 4),
)
def test_every_bundle_has_a_relay_and_every_level_a_next_one(nodes: list[str], each: int, fan: int, most: int) -> None:
    shape = Shape(4, each, fan, most)
    plan = Plan.of(nodes, shape)
    assert plan is not None and set(plan.relay_of) == set(range(len(plan.levels[0])))
    assert max(plan.relay_of.count(number) for number in set(plan.relay_of)) <= each
    assert len(plan.levels[-1]) <= most
    for low, high in zip(plan.levels, plan.levels[1:], strict=False):
        assert (len(low) - 1) // fan == len(high) - 1
    assert all(place in nodes for level in plan.levels for place in level)


def test_a_relay_is_known_by_its_name() -> None:
    assert is_relay("raypp/kjv/relay-0-3-aa00ff") and not is_relay("raypp/kjv/pp0-fsdp1")
    assert not is_relay("raypp/relay-race/standby-a1b2c3") and not is_relay("raypp/relay-race")
