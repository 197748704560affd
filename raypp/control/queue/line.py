"""The order of runs that wait for devices, the next to start, and when others do. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypp.untrusted.documents import Count

DAY_S = 86_400.0
Priority = Literal["high", "normal", "low"]
PRIORITIES: dict[Priority, float] = {"high": -DAY_S, "normal": 0.0, "low": DAY_S}
"""By how many seconds each moves a run in the line. A lower one so comes first after a day: without
that, runs of higher priority that keep coming would leave it no turn."""
_SOON_S = 60.0
"""Nobody gives way to a head that by plan can start within this time: that takes about as long."""
_LONGER = 1.25
"""A planned time is taken to be too short by this factor before a run may go past the head."""

Room = Mapping[str, tuple[float, float]]
"""CPUs and GPUs of each node."""
Turn = tuple[float, float, float, float, str]


@dataclass(frozen=True)
class Need:
    """What a run asks Ray for. `cpus`, `gpus`: of each rank."""

    ranks: Count
    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.ranks} × {self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


@dataclass(frozen=True)
class Waiting:
    """A run in the line. `turn`: the lowest is first. `seconds`: planned, or None."""

    name: str
    turn: Turn
    need: Need
    seconds: float | None = None
    priority: float = 0.0


@dataclass(frozen=True)
class Running:
    """A run that holds devices. `ends`: when, in seconds since 1970; None: unknown. `need`: its
    ranks now. `sizes`: with how many ranks it can go on, fewer than now; 0: it can wait in the
    line. `gives`: it is about to, or has not answered yet."""

    name: str
    holds: Room
    ends: float | None = None
    need: Need | None = None
    priority: float = 0.0
    sizes: tuple[int, ...] = ()
    gives: bool = False


def turn_of(at: float, priority: Priority, sent: float, nonce: str) -> Turn:
    """Returns what a ticket is sorted by, the same for every reader. `at`: when its store took it,
    which may be in whole seconds. `sent`: the submitter's clock. `nonce`: decides the rest. A run
    that is moved before another gets that one's turn with a lower number before the nonce."""
    return (at + PRIORITIES[priority], at, sent, 0.0, nonce)


def places(room: Room, need: Need) -> int:
    """Returns how many ranks have room."""
    return sum(_on_node(has, need) for has in room.values())


def next_move(
    line: Sequence[Waiting], free: Room, running: Sequence[Running], now: float, starting: Sequence[Waiting] = ()
) -> tuple[str | None, str]:
    """Returns which run starts now (None: all wait), and why the head waits. Behind a head that has
    to wait, the first that fits goes past it if by plan it does not delay the head: it ends before
    the head can start, or the head has room beside it then. None does while runs give way to the
    head, or can: they are asked once no run is starting. `line`: in order. `now`: seconds since
    1970. `starting`: runs that have had their turn and no devices yet; a run starts beside them if
    it has room wherever Ray puts them."""
    if not line:
        return None, ""

    def room(need: Need) -> int:
        return places(free, need) - sum(one.need.ranks * _costs(one.need, need) for one in starting)

    head, *others = line
    if room(head.need) >= head.need.ranks:
        return head.name, ""
    why = f"{head.name.partition('.')[0]} needs {head.need}, of which {max(0, room(head.need))} are free"
    left, running = free, list(running)
    for one in starting:
        takes = _taken(one.need, left)
        left = _changed(left, takes, -1.0)
        running.append(Running(one.name, takes, None if one.seconds is None else now + one.seconds))
    begins, then = _first_room(head.need, left, running, now)
    makes_way = any(one.gives for one in running) or who_gives(head, left, running, now)
    if begins is not None and not makes_way:  # else it would take what is made for the head
        spare = places(then, head.need) - head.need.ranks
        for one in others:
            in_time = one.seconds is not None and now + _LONGER * one.seconds <= begins
            beside = one.need.ranks * _costs(one.need, head.need) <= spare
            if (in_time or beside) and room(one.need) >= one.need.ranks:
                return one.name, why
    return None, why


def who_gives(head: Waiting, free: Room, running: Sequence[Running], now: float) -> dict[str, int]:
    """Returns which runs make room for a head that has none, each with the ranks it goes on with;
    0: it waits in the line. Only runs of lower priority do: first those that can go on with fewer
    ranks; of each kind the lowest priority first, then what would end last. Empty if that makes no
    room, or the head can start soon, or a run is about to give way."""
    begins, _ = _first_room(head.need, free, running, now)
    if any(one.gives for one in running) or (begins is not None and begins - now <= _SOON_S):
        return {}
    able = [one for one in running if one.sizes and one.need and one.priority > head.priority]
    able.sort(key=lambda one: (one.priority, math.inf if one.ends is None else one.ends, one.name), reverse=True)

    def makes_room(sizes: Mapping[str, int]) -> bool:
        then = free
        for one in able:
            if one.need and one.name in sizes:
                then = _changed(then, one.holds, 1.0)
                then = _changed(then, _taken(replace(one.need, ranks=sizes[one.name]), then), -1.0)
        return places(then, head.need) >= head.need.ranks

    tries = [(one.name, size) for one in able for size in sorted(one.sizes, reverse=True) if size]
    tries += [(one.name, 0) for one in able if 0 in one.sizes]
    given = dict[str, int]()
    for name, size in tries:
        given[name] = size
        if makes_room(given):
            break
    else:
        return {}
    for name in list(given):  # what came first may be more than enough now
        if makes_room(rest := {other: size for other, size in given.items() if other != name}):
            given = rest
    return given


def with_holds(free: Room, running: Sequence[Running], held: Mapping[str, float | None]) -> tuple[Room, list[Running]]:
    """Returns what is free for the line, and who has the rest: a held node's devices are taken
    until its hold ends, also those that a run gives back before. `held`: until when, by node."""
    parts = [Running(node, {node: room}, held[node]) for node, room in free.items() if node in held]
    for one in running:
        for node, has in one.holds.items():
            ends = (one.ends, held.get(node, one.ends))
            parts.append(replace(one, holds={node: has}, ends=None if None in ends else max(ends)))  # type: ignore[type-var]
    return {node: (0.0, 0.0) if node in held else room for node, room in free.items()}, parts


def expected_starts(
    line: Sequence[Waiting], free: Room, running: Sequence[Running], now: float
) -> dict[str, float | None]:
    """Returns when each run starts if all take the expected time, in order; None: unknown."""
    starts, held = dict[str, float | None](), list(running)
    for one in line:
        begins, room = _first_room(one.need, free, held, now)
        if begins is None:
            return {other.name: starts.get(other.name) for other in line}
        starts[one.name] = now = begins
        held = [other for other in held if other.ends is None or other.ends > begins]
        takes = _taken(one.need, room)
        free = _changed(room, takes, -1.0)
        held.append(Running(one.name, takes, None if one.seconds is None else begins + one.seconds))
    return starts


def _first_room(need: Need, free: Room, running: Sequence[Running], now: float) -> tuple[float | None, Room]:
    """Returns when there is room, as runs end in turn, and the room at that time."""
    for ends, one in sorted(((one.ends, one) for one in running if one.ends is not None), key=lambda pair: pair[0]):
        if places(free, need) >= need.ranks:
            break
        free, now = _changed(free, one.holds, 1.0), max(now, ends)
    return (now if places(free, need) >= need.ranks else None), free


def _on_node(has: tuple[float, float], need: Need) -> int:
    pairs = ((has[0], need.cpus), (has[1], need.gpus))
    return max(0, min((math.floor((amount + 1e-6) / each) for amount, each in pairs if each), default=need.ranks))


def _costs(one: Need, head: Need) -> int:
    """Returns how many places of the head a rank of another run takes at most, wherever it is."""
    pairs = ((one.cpus, head.cpus), (one.gpus, head.gpus))
    return max((math.ceil(amount / each - 1e-9) for amount, each in pairs if each), default=0)


def _taken(need: Need, free: Room) -> Room:
    """Returns what a run that fits takes of each node, those with most room first, as Ray packs."""
    taken, left = {}, need.ranks
    for node in sorted(free, key=lambda node: (-_on_node(free[node], need), node)):
        here = min(left, _on_node(free[node], need))
        taken[node], left = (here * need.cpus, here * need.gpus), left - here
    return taken


def _changed(room: Room, by: Room, sign: float) -> Room:
    """Returns the room with what a run holds given back, or taken. A lost node gets nothing."""
    there = {node: by.get(node, (0.0, 0.0)) for node in room}
    return {node: (has[0] + sign * there[node][0], has[1] + sign * there[node][1]) for node, has in room.items()}
