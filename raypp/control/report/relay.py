"""Many ranks' reports in few calls: an actor call costs the controller the same, whatever it carries.

A relay takes the batches of its ranks (or the parcels of other relays) and hands them on in one parcel. Who brings
news (steps, events, log lines) is answered when the controller has taken it, and who brings none is answered at once,
with the controller's last word. A relay keeps nothing that nobody else has: when it dies, the ranks whose news it held
get no answer, and tell the controller the same batch themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raypp.control.orphan import Lifeline
from raypp.control.protocol import Answer, Batch, Beat, Parcel, Word
from raypp.records import Requests

NEWS_S = 0.25
"""Steps and events wait at a relay for those of others at most so long."""
BEATS_S = 1.0
"""What brings nothing but signs of life is handed on so often, and told so often by a rank that has a relay."""
_RANK_PATIENCE_S = 3.0
_RELAY_PATIENCE_S = 2.0
_CONTROLLER_PATIENCE_S = 5.0
_FRESH_S = 5.0  # a word that is older does not count as an answer
_FIRST_DETOUR_S = 5.0
_LONGEST_DETOUR_S = 300.0

Carrier = Callable[[Parcel], Awaitable[Word]]


@dataclass
class Detour:
    """Whether a way is to be tried: not for a while after it failed, and for twice as long after each failure more."""

    _until: float = 0.0
    _next_s: float = _FIRST_DETOUR_S

    def over(self) -> bool:
        return time.monotonic() >= self._until

    def failed(self) -> None:
        self._until = time.monotonic() + self._next_s
        self._next_s = min(2 * self._next_s, _LONGEST_DETOUR_S)

    def worked(self) -> None:
        self._next_s = _FIRST_DETOUR_S


class Way:
    """How a rank's batches come to the controller: by its relay, and directly when that does not answer.

    Args:
        direct: Hands a batch to the controller; raises when that takes it not.
        relayed: Hands it to the rank's relay, in the same manner; None when it has none.
        pace_s: Seconds between two reports that go directly.
    """

    def __init__(
        self, direct: Callable[[Batch], Answer], relayed: Callable[[Batch], Answer] | None, pace_s: float
    ) -> None:
        self._direct = direct
        self._relayed = relayed
        self._direct_pace_s = pace_s
        self._detour = Detour()
        self.pace_s = pace_s
        """Seconds until the next report, if nothing happens before."""

    def hand_over(self, batch: Batch) -> Answer:
        """Hands over a batch. The controller knows it again when both ways have led there.

        Raises:
            Exception: Whatever the direct way raised; nobody is known to have taken the batch.
        """
        why: Exception | None = None
        if self._relayed is not None and self._detour.over():
            try:
                answer = self._relayed(batch)
            except Exception as error:  # noqa: BLE001  dead, frozen, cut off, or not started yet
                why = error
            else:
                self._detour.worked()
                self.pace_s = BEATS_S
                return answer
        self.pace_s = self._direct_pace_s
        answer = self._direct(batch)
        if why is not None:  # and not the controller was away
            self._detour.failed()
            print(f"reporting directly: the relay does not answer ({type(why).__name__})", file=sys.stderr)  # noqa: T201
        return answer


def way_of(controller: Any, relay: Any, rank: int, direct_pace_s: float, patience_s: float) -> Way:
    """The way of a rank's batches through Ray.

    Rank 0, which tells the steps and is asked for saves, speaks to the controller itself: a relay that died could take
    with it that a save was asked for.

    Args:
        relay: Handle of the rank's relay; None in a run without.
        patience_s: For the controller's answer.
    """

    def direct(batch: Batch) -> Answer:
        answer: Answer = ray.get(controller.report.remote(batch), timeout=patience_s)
        return answer

    def relayed(batch: Batch) -> Answer:
        answer: Answer = ray.get(relay.report.remote(batch), timeout=_RANK_PATIENCE_S)
        return answer

    if relay is None:
        return Way(direct, None, direct_pace_s)
    return Way(direct, None if rank == 0 else relayed, min(BEATS_S, direct_pace_s) if rank == 0 else direct_pace_s)


@dataclass
class _Held:
    """What is to be handed on next.

    Attributes:
        attempt: Of the beats.
        beats: By rank, with the time each was told.
        waiting: Who is to hear whether that worked.
    """

    attempt: int = 0
    beats: dict[int, tuple[float, Beat]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def put_back(self, other: _Held) -> None:
        """The beats that could not be handed on, where there are no newer ones."""
        if other.attempt == self.attempt:
            self.beats = other.beats | self.beats


class Sorting:
    """What a relay does, whatever carries its parcels. Everything happens in one event loop.

    Args:
        carriers: Ways up, best first, with the seconds each has to answer.
        news_s: See `NEWS_S`.
        beats_s: See `BEATS_S`.
    """

    def __init__(
        self, carriers: Sequence[tuple[Carrier, float]], news_s: float = NEWS_S, beats_s: float = BEATS_S
    ) -> None:
        self._carriers = [(carrier, patience_s, Detour()) for carrier, patience_s in carriers]
        self._news_s, self._beats_s = news_s, beats_s
        self._held = _Held()
        self._unwritten: dict[int, int] = {}
        self._word = Word()
        self._urgent = asyncio.Event()
        self.heard = -_FRESH_S - 1.0 + time.monotonic()
        """When the controller last said a word, directly or through another relay (`time.monotonic`)."""

    async def report(self, batch: Batch) -> Answer:
        """A rank's batch.

        Raises:
            ConnectionError: The controller is not known to have taken it.
        """
        beat = Beat(batch.rank, batch.phase, batch.idle_s, 0.0, batch.inside)
        news = bool(batch.steps or batch.events or batch.logs)
        word = await self.take(Parcel(batch.attempt, (beat,), (batch,) if news else ()))
        if word.attempt != batch.attempt:  # what the ranks of another attempt are asked to do is not for this one
            return Answer(Requests(), word.life, 0, word.ago_s)
        return Answer(word.requests, word.life, self._word.durable.get(batch.rank, 0), word.ago_s)

    async def take(self, parcel: Parcel) -> Word:
        """Another relay's parcel; errors as with `report`."""
        now = time.monotonic()
        if parcel.attempt > self._held.attempt:
            self._held.attempt = parcel.attempt
            self._held.beats.clear()
            self._unwritten.clear()
        if parcel.attempt == self._held.attempt:
            for beat in parcel.beats:
                self._held.beats[beat.rank] = (now - beat.ago_s, beat)
            self._remember(parcel)
        if parcel.batches or now - self.heard > _FRESH_S:
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.batches += parcel.batches
            self._held.waiting.append(told)
            self._urgent.set()
            await told
        durable = {rank: self._word.durable[rank] for rank in parcel.unwritten if rank in self._word.durable}
        return replace(self._word, durable=durable, ago_s=time.monotonic() - self.heard)

    async def hand_on(self) -> None:
        """Carries parcels, for ever."""
        sent = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), max(0.0, sent + self._beats_s - time.monotonic()))
            await asyncio.sleep(sent + self._news_s - time.monotonic())
            self._urgent.clear()
            sent = time.monotonic()
            if self._held.beats or self._held.waiting:
                await self._hand_on_once()

    async def _hand_on_once(self) -> None:
        held, self._held = self._held, _Held(self._held.attempt)
        failed: list[Detour] = []
        for carrier, patience_s, detour in self._carriers:
            if not detour.over() and carrier is not self._carriers[-1][0]:
                continue
            try:
                word = await asyncio.wait_for(carrier(self._parcel(held)), patience_s)
            except Exception:  # noqa: BLE001  dead, frozen, cut off: the next way, or none
                failed.append(detour)
                continue
            detour.worked()
            for other in failed:  # when no way leads there, it is the controller that is away
                other.failed()
            self._learn(word)
            for told in held.waiting:
                if not told.done():
                    told.set_result(None)
            return
        self._held.put_back(held)
        for told in held.waiting:
            if not told.done():
                told.set_exception(ConnectionError("the controller does not answer"))

    def _parcel(self, held: _Held) -> Parcel:
        now = time.monotonic()
        beats = tuple(beat._replace(ago_s=now - at) for at, beat in held.beats.values())
        return Parcel(held.attempt, beats, tuple(held.batches), dict(self._unwritten))

    def _remember(self, parcel: Parcel) -> None:
        """Whose news has to come into the store yet."""
        for rank, number in parcel.unwritten.items():
            self._unwritten[rank] = max(number, self._unwritten.get(rank, 0))
        for batch in parcel.batches:
            if batch.steps or batch.events:
                self._unwritten[batch.rank] = batch.number

    def _learn(self, word: Word) -> None:
        if word.ago_s > _FRESH_S:
            return
        self.heard = max(self.heard, time.monotonic() - word.ago_s)
        same = (word.life, word.attempt) == (self._word.life, self._word.attempt)
        self._word = replace(word, durable={**(self._word.durable if same else {}), **word.durable})
        for rank, number in word.durable.items():
            if word.attempt == self._held.attempt and number >= self._unwritten.get(rank, number + 1):
                del self._unwritten[rank]


class Relay:
    """The actor around a `Sorting`. Like every process of a run it ends by itself when nobody leads the run any more.

    Args:
        run: The run's name.
        controller: Handle of the run's controller.
        above: Handle of the relay that its parcels go to; None: they go to the controller.
        orphan_timeout_s: As of the run's workers.
        ask_every_s: Seconds between two questions to a controller of which nothing was heard.
    """

    def __init__(self, run: str, controller: Any, above: Any, orphan_timeout_s: float, ask_every_s: float) -> None:
        self._run = run
        self._controller = controller
        self._own = ray.get_runtime_context().current_actor
        carriers: list[tuple[Carrier, float]] = [(_carrier(controller), _CONTROLLER_PATIENCE_S)]
        if above is not None:
            carriers.insert(0, (_carrier(above), _RELAY_PATIENCE_S))
        self._sorting = sorting = Sorting(carriers)
        self._task: asyncio.Task[None] | None = None
        self._lifeline = Lifeline(
            self._find_controller, orphan_timeout_s, self._end, ask_every_s, lambda: sorting.heard
        )

    def __repr__(self) -> str:
        return f"raypp/{self._run}/relay"

    async def report(self, batch: Batch) -> Answer:
        """A rank's batch."""
        self._work()
        return await self._sorting.report(batch)

    async def relay(self, parcel: Parcel) -> Word:
        """Another relay's parcel."""
        self._work()
        return await self._sorting.take(parcel)

    async def stay(self) -> None:
        """Never answers, except by the end of this process."""
        await asyncio.Event().wait()

    def _work(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._sorting.hand_on())

    def _find_controller(self) -> None:
        ray.get(self._controller.alive.remote(), timeout=10)

    def _end(self) -> None:
        threading.Timer(10.0, os._exit, (0,)).start()  # when Ray does not hear either, it starts nothing anew
        with contextlib.suppress(Exception):
            ray.kill(self._own, no_restart=True)


def _carrier(actor: Any) -> Carrier:
    async def carry(parcel: Parcel) -> Word:
        word: Word = await actor.relay.remote(parcel)
        return word

    return carry
