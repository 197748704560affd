"""The line of runs that wait for devices: who is next, by simulated clusters; damaged tickets."""

import os
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control.queue.client import time_of
from raypp.control.queue.line import (
    DAY_S,
    PRIORITIES,
    Need,
    Running,
    Waiting,
    expected_starts,
    next_move,
    places,
    turn_of,
    who_gives,
    with_holds,
)
from raypp.control.queue.ticket import Ticket, circle, kept_place, moved_before, read_ticket, waited_s, write_ticket
from raypp.errors import CheckpointError, JobError
from raypp.storage.directory import DirectoryStore

ROOM = {"a": (8.0, 4.0), "b": (8.0, 4.0)}
needs = st.builds(Need, st.integers(1, 8), st.just(1.0), st.sampled_from([0.0, 1.0]))
arrivals = st.tuples(
    st.floats(0, 50), needs, st.floats(1, 30), st.sampled_from(["high", "normal", "low"]), st.booleans()
)


holds = st.dictionaries(st.sampled_from(["a", "b"]), st.tuples(st.floats(0, 60), st.floats(0, 60)).map(sorted))
pauses = st.tuples(st.floats(0, 60), st.floats(0, 60)).map(sorted)


class Simulated:
    """A cluster in which runs take as long as planned, which not all tell. `held`: from when until
    when, by node. `paused`: from when until when. `promised`: when each head could start, as it was
    told first."""

    def __init__(self, jobs: list[tuple[float, Need, float, str, bool]], held=(), paused=(0.0, 0.0)) -> None:
        self.held, self.paused = dict(held), paused
        self.free, self.running, self.begun = dict(ROOM), dict[str, tuple[Running, float]](), dict[str, float]()
        self.jobs: dict[str, tuple[float, Waiting, float]] = {}
        for name, (at, need, length, priority, known) in zip("abcdefghijkl", jobs, strict=False):
            waiting = Waiting(name, turn_of(at, priority, at, name), need, length if known else None)
            self.jobs[name] = (at, waiting, length)
        self.promised: dict[str, float] = {}

    def play(self) -> None:
        moments = {at for at, _, _ in self.jobs.values()} | {end for _, end in [*self.held.values(), self.paused]}
        while moments:
            now = min(moments)
            moments.discard(now)
            for name, (run, end) in list(self.running.items()):
                if end <= now:
                    del self.running[name]
                    for node, (cpus, gpus) in run.holds.items():
                        self.free[node] = (self.free[node][0] + cpus, self.free[node][1] + gpus)
            while chosen := self.turns(now):
                moments |= {self.start(name, now) for name in chosen}

    def turns(self, now: float) -> list[str]:
        """Returns the runs that have their turn before the first of them has devices."""
        chosen = list[str]()
        while (name := self.turn(now, chosen)) is not None:
            chosen.append(name)
        return chosen

    def turn(self, now: float, chosen: list[str]) -> str | None:
        gone = {*self.begun, *chosen}
        line = [one for at, one, _ in self.jobs.values() if at <= now and one.name not in gone]
        line.sort(key=lambda one: one.turn)
        free, running = with_holds(self.free, [run for run, _ in self.running.values()], self.held_now(now))
        if not line or self.paused[0] <= now < self.paused[1]:
            return None
        name, _ = next_move(line, free, running, now, [self.jobs[one][1] for one in chosen])
        head = line[0]
        room = places(free, head.need) >= head.need.ranks
        assert chosen or (name == head.name) == room, "a head that has room starts, and nothing before it"
        all_known = all(run.ends is not None for run in running)
        if not room and all_known and not chosen:
            expected = expected_starts(line[:1], free, running, now)[head.name]
            assert expected is not None
            self.promised[head.name] = min(expected, self.promised.get(head.name, expected))
        return name

    def held_now(self, now: float) -> dict[str, float]:
        return {node: end for node, (begin, end) in self.held.items() if begin <= now < end}

    def start(self, name: str, now: float) -> float:
        _, one, length = self.jobs[name]
        holds, left = {}, one.need.ranks
        for node in sorted(self.free.keys() - self.held_now(now).keys()):
            has = self.free[node]
            here = min(left, places({node: has}, one.need))
            holds[node], left = (here * one.need.cpus, here * one.need.gpus), left - here
            self.free[node] = (has[0] - holds[node][0], has[1] - holds[node][1])
        assert left == 0, "what starts has room"
        self.begun[name] = now
        self.running[name] = (Running(name, holds, None if one.seconds is None else now + length), now + length)
        return now + length


@settings(max_examples=60)
@given(st.lists(arrivals, min_size=1, max_size=12), holds, pauses)
def test_all_runs_get_their_turn_and_none_goes_before_a_head_that_has_room(jobs, held, paused) -> None:
    cluster = Simulated(jobs, held, paused)
    cluster.play()
    assert cluster.begun.keys() == cluster.jobs.keys()
    assert not any(paused[0] <= at < paused[1] for at in cluster.begun.values())


@settings(max_examples=60)
@given(st.lists(arrivals, min_size=2, max_size=12), st.dictionaries(st.sampled_from(["a", "b"]), st.floats(1, 60)))
def test_runs_that_go_past_the_head_do_not_delay_it(jobs, held) -> None:
    """All come at once, so that the head stays the head, and all lengths and holds are known."""
    known = [(0.0, need, length, priority, True) for _, need, length, priority, _ in jobs]
    cluster = Simulated(known, {node: (0.0, end) for node, end in held.items()})
    cluster.play()
    assert all(cluster.begun[name] <= promised + 1e-6 for name, promised in cluster.promised.items())


def rooms(most: int):
    return st.fixed_dictionaries({node: st.tuples(st.integers(0, most).map(float), st.just(0.0)) for node in "abc"})


@given(rooms(6), st.lists(st.builds(Need, st.integers(1, 3), st.just(1.0)), max_size=4), st.integers(1, 9), st.data())
def test_a_head_starts_beside_runs_without_devices_yet_only_if_it_has_room_wherever_ray_puts_them(
    free, starting, ranks, data
) -> None:
    head = Waiting("head", (0.0,), Need(ranks, 2.0))
    name, _ = next_move([head], free, [], 0.0, [Waiting("s", (0.0,), need) for need in starting])
    for _ in range(sum(need.ranks for need in starting)):
        able = [node for node, (cpus, _) in free.items() if cpus >= 1.0]
        if able:
            node = data.draw(st.sampled_from(able))
            free = free | {node: (free[node][0] - 1.0, 0.0)}
    assert name is None or places(free, head.need) >= ranks


givers = st.builds(
    Running, st.sampled_from("vwxyz"), rooms(4), st.one_of(st.none(), st.floats(0, 500)), st.just(Need(12, 1.0)),
    st.sampled_from([*PRIORITIES.values()]), st.sampled_from([(), (0,), (2,), (4, 2), (6, 3, 0)]),
)  # fmt: skip


@given(
    rooms(3), st.lists(givers, max_size=5, unique_by=lambda one: one.name), st.integers(1, 14),
    st.sampled_from([*PRIORITIES.values()]),
)  # fmt: skip
def test_room_is_made_by_runs_of_lower_priority_by_shrinking_first_and_by_no_more_than_needed(
    free, runs, ranks, priority
) -> None:
    runs = [replace(one, need=Need(int(sum(cpus for cpus, _ in one.holds.values())), 1.0)) for one in runs]
    runs = [replace(one, sizes=tuple(size for size in one.sizes if size < one.need.ranks)) for one in runs]
    head = Waiting("head", (0.0,), Need(ranks, 1.0), priority=priority)
    given = who_gives(head, free, runs, 0.0)
    able = [one for one in runs if one.priority > priority and one.sizes]

    def room(sizes) -> float:
        gives = sum(one.need.ranks - sizes.get(one.name, one.need.ranks) for one in able)
        return gives + sum(cpus for cpus, _ in free.values())

    soon = [one for one in runs if one.ends is not None and one.ends <= 60]
    if room({}) + sum(one.need.ranks for one in soon) >= ranks:
        assert not given, "the head starts, or can soon"
    elif room({one.name: min(one.sizes) for one in able}) < ranks:
        assert not given
    else:
        assert room(given) >= ranks and given.keys() <= {one.name for one in able}
        assert all(room({n: size for n, size in given.items() if n != name}) < ranks for name in given)
        shrunk = {one.name: least for one in able if (least := min((n for n in one.sizes if n), default=None))}
        assert room(shrunk) < ranks or 0 not in given.values()
    assert not who_gives(head, free, [*runs, Running("u", {}, gives=True)], 0.0), "one at a time"


@given(st.lists(st.tuples(st.floats(0, 1e9), st.sampled_from(["high", "normal", "low"])), max_size=9), st.randoms())
def test_every_reader_sees_one_order(tickets, random) -> None:
    turns = [turn_of(at, priority, 0.0, str(index)) for index, (at, priority) in enumerate(tickets)]
    shuffled = random.sample(turns, len(turns))
    assert sorted(shuffled) == sorted(turns) and len(set(turns)) == len(turns)


def test_a_priority_is_worth_a_day_so_that_nothing_starves() -> None:
    assert turn_of(10.0, "high", 0, "x") < turn_of(5.0, "normal", 0, "x") < turn_of(0.0, "low", 0, "x")
    assert turn_of(0.0, "low", 0, "x") < turn_of(DAY_S + 1, "normal", 0, "x")
    assert turn_of(7.0, "normal", 7.4, "b") < turn_of(7.0, "normal", 7.5, "a"), "a store that counts seconds"


@given(
    st.lists(st.sampled_from(list(PRIORITIES)), min_size=2, max_size=7),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9),
)
def test_a_moved_run_is_directly_before_the_other_and_passes_none_of_higher_priority(priorities, moves) -> None:
    tickets = [
        Ticket(name, "/s", 1, "ann", priority, Need(1, 1.0), None, {}, at=float(at), sent=0.0, nonce=name)
        for at, (name, priority) in enumerate(zip("abcdefg", priorities, strict=False))
    ]
    line = sorted(tickets, key=lambda ticket: ticket.waiting.turn)
    for i, j in moves:
        one, other = line[i % len(line)], line[j % len(line)]
        if one is other:
            continue
        wanted = [ticket for ticket in line if ticket is not one]
        wanted.insert(wanted.index(other), one)
        pairs = [(low, high) for low in line for high in line if PRIORITIES[low.priority] > PRIORITIES[high.priority]]
        inverted = [p for p in pairs if line.index(p[0]) > line.index(p[1]) and wanted.index(p[0]) < wanted.index(p[1])]
        try:
            moved = moved_before(line, one, other)
        except JobError as error:
            assert any(low.run in str(error) and high.run in str(error) for low, high in inverted)
            continue
        assert not inverted
        line = sorted([moved, *(ticket for ticket in line if ticket is not one)], key=lambda one: one.waiting.turn)
        assert [ticket.run for ticket in line] == [ticket.run for ticket in wanted]
        assert Ticket.read(moved.encoded(), "here") == moved


def test_runs_that_would_wait_for_each_other_are_named() -> None:
    waiting = {"a": ["b"], "b": ["c", "d"], "d": ["e"], "e": ["d"]}
    assert circle("c", ["a"], waiting) == ["c", "a", "b"]
    assert circle("c", ["c"], {}) == ["c"]
    assert circle("new", ["a", "e"], waiting) == circle("c", [], waiting) == []


def test_a_hold_keeps_what_runs_give_back_on_its_node_until_it_ends() -> None:
    runs = [Running("x", {"a": (4.0, 0.0), "b": (2.0, 0.0)}, 10.0), Running("y", {"a": (1.0, 0.0)})]
    free = {"a": (3.0, 0.0), "b": (6.0, 0.0)}

    def start(ranks: int, until: float | None) -> float | None:
        left, taken = with_holds(free, runs, {"a": until})
        return expected_starts([Waiting("w", (0.0,), Need(ranks, 1.0))], left, taken, 5.0)["w"]

    assert [start(ranks, 50.0) for ranks in (6, 8, 9, 15, 16)] == [5.0, 10.0, 50.0, 50.0, None]
    assert [start(ranks, 7.0) for ranks in (9, 15)] == [7.0, 10.0] and start(9, None) is None


def test_a_hold_ends_at_the_next_such_time_and_a_wrong_one_is_refused() -> None:
    now = datetime.now()
    for text in ("00:00", "23:59", f"{now + timedelta(minutes=5):%H:%M}"):
        when = datetime.fromtimestamp(time_of(text))
        assert now < when <= now + timedelta(days=1, minutes=1) and f"{when:%H:%M}" == text
    assert datetime.fromtimestamp(time_of("2999-01-02 03:04")) == datetime(2999, 1, 2, 3, 4)
    for text in ("soon", "24:00", "", "2020-01-01 10:00", "18:00 18:00"):
        with pytest.raises(JobError, match=r"is not a time to come\n.*18:00"):
            time_of(text)


def test_a_small_run_goes_past_only_if_it_ends_in_time_or_leaves_room() -> None:
    head, free = Waiting("head", (0.0,), Need(8, 1.0, 1.0)), {"a": (8.0, 0.0), "b": (8.0, 4.0)}
    holder = Running("holder", {"a": (4.0, 4.0)}, ends=100.0)

    def beside(need: Need, seconds: float | None, running: Running = holder) -> str | None:
        return next_move([head, Waiting("small", (1.0,), need, seconds)], free, [running], 0.0)[0]

    card, processor = Need(1, 1.0, 1.0), Need(1, 1.0)
    assert beside(card, 79.0) == "small" and beside(card, 81.0) is None and beside(card, None) is None
    assert beside(processor, None) is None, "beside 16 CPUs of which the head needs 8, it may be on the wrong node"
    assert beside(card, 79.0, replace(holder, ends=None)) is None, "nobody knows when the head starts"
    assert beside(card, 1.0, replace(holder, gives=True)) is None, "it would take what is made for the head"
    able = replace(holder, need=Need(4, 1.0, 1.0), sizes=(0,), priority=1.0)
    assert beside(card, 1.0, able) is None, "the holder is about to be asked for room"
    assert beside(card, 30.0, replace(able, ends=50.0)) == "small", "the head starts soon, nobody is asked"
    parts = with_holds(free, [replace(holder, gives=True)], {"b": 5.0})[1]
    assert [one.gives for one in parts if one.name == "holder"] == [True]
    assert next_move([head], free, [holder], 0.0) == (None, "head needs 8 × 1 CPU and 1 GPU, of which 4 are free")


def test_starts_are_expected_in_turn_as_far_as_ends_are_known() -> None:
    line = [Waiting("x", (0.0,), Need(8, 1.0, 1.0), 50.0), Waiting("y", (1.0,), Need(1, 1.0, 1.0))]
    line += [Waiting("z", (2.0,), Need(8, 1.0, 1.0), 5.0)]
    holder = Running("holder", {"a": (4.0, 4.0)}, ends=100.0)
    free = {"a": (4.0, 0.0), "b": (8.0, 4.0)}
    assert expected_starts(line, free, [holder], 7.0) == {"x": 100.0, "y": 150.0, "z": None}


def test_a_ticket_keeps_the_place_of_one_that_never_began_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    ticket = Ticket("mine", store.url, 1, "ann", "low", Need(2, 1.0), 60.0, {"submission_id": "1", "keys": "secret"})
    placed = write_ticket(store, ticket)
    stored = read_ticket(store, "mine", 1)
    assert stored is not None and (stored.submission_id, stored.at, "secret" in str(stored)) == ("1", None, False)
    assert placed.at is not None and kept_place(store, "mine", 1) is None and kept_place(store, "mine", 2) == placed.at
    write_ticket(store, replace(placed, number=2))
    assert kept_place(store, "mine", 3) == placed.at
    store.put("mine/attempts/attempt-1", b"")
    assert kept_place(store, "mine", 3) is None, "it had its turn"
    store.put("mine/queued-3.json", b'{"run": 3}')
    with pytest.raises(CheckpointError, match=r"mine/queued-3\.json"):
        read_ticket(store, "mine", 3)
    assert Ticket.read(placed.encoded(), "here") == placed and placed.name.startswith("mine.")
    with pytest.raises(CheckpointError, match="the ticket x"):
        Ticket.read(placed.encoded()[:-9], "the ticket x")


def test_a_run_has_waited_until_its_first_attempt_or_its_end_and_once_for_tickets_of_one_place(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)

    def put(key: str, at: float) -> None:
        store.put(f"r/{key}", b"")
        os.utime(tmp_path / "r" / key, (at, at))

    put("attempts/attempt-1", 50.0)
    assert waited_s(store, "r") is None, "it never waited"
    for key, at in [("queued-2.json", 100.0), ("queued-3.json", 120.0), ("attempts/attempt-2", 160.0)]:
        put(key, at)
    put("attempts/attempt-3", 400.0)
    assert waited_s(store, "r") == 60.0
    put("queued-4.json", 1000.0)
    put("end-4.json", 1005.0)
    assert waited_s(store, "r") == 65.0
    put("queued-4-3.json", 1100.0)
    put("attempts/attempt-4", 1130.0)
    assert waited_s(store, "r") == 95.0, "it gave way"
    put("queued-5.json", time.time() - 500)
    assert (waited_s(store, "r") or 0) > 590, "it waits"
