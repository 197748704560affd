"""When actions run and messages arrive if messages share network cards, or wait for receives.

A simulation by events. Cards are full duplex. Messages that leave one card at the same time get
equal shares of its rate, and so do those that arrive; the smaller share counts. A channel carries
one message at a time, in order, each once its receive is posted.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

Channel = tuple[int, int]
"""The sending and the receiving rank, by their places among all ranks."""


class Step(NamedTuple):
    """An action, as the simulation needs it.

    Attributes:
        needs: Number of the result that it waits for; 0: none.
        gives: Number of its result; 0: nobody takes it.
        channel: Index of the channel that its result crosses; negative: it stays on its rank.
        seconds: Time that the action takes.
        message_s: Time of the result on idle cards.
    """

    needs: int
    gives: int
    channel: int
    seconds: float
    message_s: float


class _Crossing:
    """A message on its way."""

    __slots__ = ("left", "rate", "result", "since", "version")

    def __init__(self, result: int, left: float, now: float) -> None:
        self.result, self.left, self.since = result, left, now
        self.rate, self.version = 0.0, 0


class SharedCards:
    """One simulation. `cards`: the card of every rank; ranks on one host have the same. None: each
    channel of the rank has a card of its own. Messages between ranks of one card do not cross it.
    `posts`: the results whose receives every rank posts before its step of a number, by this
    number. None: all are posted from the start."""

    def __init__(
        self,
        lines: Sequence[Sequence[Step]],
        channels: Sequence[Channel],
        cards: Sequence[int | None],
        posts: Sequence[Mapping[int, Sequence[int]]] | None = None,
    ) -> None:
        self._lines, self._channels, self._posts = lines, channels, posts
        self._posted: set[int] = set()
        self._channel_of = {step.gives: step.channel for line in lines for step in line} if posts else {}
        self._taker = {step.needs: rank for rank, line in enumerate(lines) for step in line if step.needs}
        self._used = [_cards_of(index, source, to, cards) for index, (source, to) in enumerate(channels)]
        self._beside: list[list[int]] = [
            [other for other, theirs in enumerate(self._used) if not set(own).isdisjoint(theirs)] for own in self._used
        ]
        self._load: dict[tuple[str, int], int] = dict.fromkeys((card for used in self._used for card in used), 0)
        self._crossing: list[_Crossing | None] = [None] * len(channels)
        self._queued: list[deque[tuple[int, float]]] = [deque() for _ in channels]
        self._arrived = {0}
        self._place = [0] * len(lines)
        self._computes = [False] * len(lines)
        self._events: list[tuple[float, int, int, int]] = []
        self._order = 0
        self.slots: list[list[tuple[float, float]]] = [[] for _ in lines]
        """Start and end of every step, by rank."""

    def run(self) -> None:
        """Simulates all steps; fills `slots`. The lines do not deadlock."""
        for rank in range(len(self._lines)):
            self._next(rank, 0.0)
        events, ranks = self._events, len(self._lines)
        while events:
            now, _, which, version = heappop(events)
            if which < ranks:
                self._ended(which, now)
                continue
            crossing = self._crossing[which - ranks]
            if crossing is not None and crossing.version == version:
                self._crossed(which - ranks, crossing, now)
        assert self._place == [*map(len, self._lines)], "a rank waits for a receive that is never posted"

    def _note(self, time: float, which: int, version: int = 0) -> None:
        self._order += 1  # events of the same time keep the order in which they were found
        heappush(self._events, (time, self._order, which, version))

    def _next(self, rank: int, now: float) -> None:
        for result in self._posts[rank].get(self._place[rank], ()) if self._posts else ():
            self._posted.add(result)
            self._send(self._channel_of[result], now)
        self._begin(rank, now)

    def _begin(self, rank: int, now: float) -> None:
        """Begins the next step of a rank, if the rank is free and the step's input is there."""
        line, at = self._lines[rank], self._place[rank]
        if not self._computes[rank] and at < len(line) and line[at].needs in self._arrived:
            self._computes[rank] = True
            self.slots[rank].append((now, now + line[at].seconds))
            self._note(now + line[at].seconds, rank)

    def _ended(self, rank: int, now: float) -> None:
        step = self._lines[rank][self._place[rank]]
        self._place[rank] += 1
        self._computes[rank] = False
        if step.gives and step.channel < 0:
            self._arrived.add(step.gives)
        elif step.gives:
            self._queued[step.channel].append((step.gives, step.message_s))
            self._send(step.channel, now)
        self._next(rank, now)

    def _send(self, channel: int, now: float) -> None:
        """Sends the next message of a channel, if the channel is free and the receive is posted."""
        if self._crossing[channel] is not None or not self._queued[channel]:
            return
        if self._posts and self._queued[channel][0][0] not in self._posted:
            return
        result, seconds = self._queued[channel].popleft()
        self._crossing[channel] = _Crossing(result, seconds, now)
        for card in self._used[channel]:
            self._load[card] += 1
        self._share(channel, now)

    def _crossed(self, channel: int, crossing: _Crossing, now: float) -> None:
        self._crossing[channel] = None
        for card in self._used[channel]:
            self._load[card] -= 1
        self._send(channel, now)
        self._share(channel, now)
        self._arrived.add(crossing.result)
        self._begin(self._taker[crossing.result], now)

    def _share(self, channel: int, now: float) -> None:
        """Sets the rates of a channel's message and of those that share a card with it."""
        load = self._load
        for other in self._beside[channel]:
            if (crossing := self._crossing[other]) is None:
                continue
            self._set_rate(other, crossing, 1.0 / max(load[card] for card in self._used[other]), now)

    def _set_rate(self, channel: int, crossing: _Crossing, rate: float, now: float) -> None:
        if rate == crossing.rate:
            return
        crossing.left = max(0.0, crossing.left - (now - crossing.since) * crossing.rate)
        crossing.since, crossing.rate = now, rate
        crossing.version += 1
        if rate:
            self._note(now + crossing.left / rate, len(self._lines) + channel, crossing.version)


def _cards_of(index: int, source: int, to: int, cards: Sequence[int | None]) -> tuple[tuple[str, int], ...]:
    """Returns the ends of cards that a channel uses: outward at its source, inward at its target. A
    channel without a shared card has one to itself."""
    ends = ("out", cards[source]), ("in", cards[to])
    used = [(end, card) for end, card in ends if card is not None and cards[source] != cards[to]]
    return tuple(used) or (("own", index),)
