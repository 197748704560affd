"""Split-backward programs by list scheduling: at each tick, each rank runs its most urgent action.

Every action (F, I, W) takes one tick, a message a given number. Urgency: I, because earlier ranks
wait for it; F, while the rank may hold another microbatch; W, which nobody waits for and which
fills bubbles (arXiv:2401.10241).

No deadlock: a rank starts the forward of its n-th last stage only if n slots are free, and stages
take microbatches in order, so the oldest unfinished microbatch can always continue.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from raypp.planning.schedules.action import Action, Kind

_UNREAD = 2
"""Forwards of a stage that the next stage has not run yet; only where messages take time. Two keep
it busy: one is on the link, one is waiting. More fill the room of the ranks above for nothing."""

Urgency = Callable[[Action], tuple[int, ...]]
"""Sort key of the F or I actions of one rank: the smallest runs first. No two may be equal."""


def greedy_program(
    placement: Sequence[Sequence[int]], microbatches: int, room: Sequence[int], urgency: Urgency, message: int = 0
) -> dict[int, list[Action]]:
    """Builds the program of every rank.

    Args:
        room: For each rank, the most forwards whose W is not done; at least the number of its
            stages.
        urgency: Orders the forwards, or the I actions, that are possible at the same time.
        message: Ticks in which a message crosses from one rank to another. If it takes any, a stage
            is at most `_UNREAD` forwards ahead of the next stage: more would only queue there.
    """
    clock = _Clock(placement, microbatches, room, urgency, message)
    program: dict[int, list[Action]] = {rank: [] for rank in range(len(placement))}
    awake = set(program)  # a rank that could do nothing waits for a result of another one
    while awake:
        taken = []
        for rank in awake:
            if (action := clock.choose(rank)) is not None:
                program[rank].append(action)
                taken.append(action)
        awake = clock.tick(taken)
    first = next(rank for rank, stages in enumerate(placement) if 0 in stages)
    return {**program, first: _joined(program[first])}


_Heap = list[tuple[tuple[int, ...], Action]]
"""Actions that are possible, the most urgent first."""


class _Clock:
    """The progress of every stage, and what each rank can run next. Every stage offers at most one
    action of each kind, that of its next microbatch. An action that is possible stays so until it
    is run; only the room for forwards changes."""

    def __init__(
        self, placement: Sequence[Sequence[int]], microbatches: int, room: Sequence[int], urgency: Urgency, message: int
    ) -> None:
        self.microbatches, self.urgency, self.room = microbatches, urgency, list(room)  # what is left
        stages = sum(map(len, placement))
        self.last = stages - 1
        self.rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
        self.later = {stage: later for held in placement for later, stage in enumerate(reversed(held))}
        self.done: dict[Kind, list[int]] = {kind: [0] * stages for kind in ("F", "I", "W")}
        self.arrived: dict[Kind, list[int]] = {kind: [0] * stages for kind in ("F", "I")}
        self.arrived["F"][0] = microbatches
        self.message, self.now = message, 0
        self.unread = _UNREAD if message else microbatches
        self.crossing: list[tuple[int, Kind, int]] = []  # a heap: when a result arrives, and at which stage
        self.free: defaultdict[tuple[int, int], int] = defaultdict(int)  # when a channel can take a message
        self.offered: set[tuple[Kind, int]] = set()
        self.heaps: dict[Kind, list[_Heap]] = {kind: [[] for _ in placement] for kind in ("F", "I", "W")}
        self._offer("F", 0)

    def choose(self, rank: int) -> Action | None:
        """Takes the most urgent action that a rank can run in this tick, if any."""
        if self.heaps["I"][rank]:
            return heappop(self.heaps["I"][rank])[1]
        forwards = self.heaps["F"][rank]
        if forwards and self._fits(rank, forwards[0][1].stage):
            self.room[rank] -= 1
            return heappop(forwards)[1]
        possible = [entry for entry in forwards if self._fits(rank, entry[1].stage)] if self.room[rank] > 0 else []
        if possible:
            best = min(possible)
            forwards.remove(best)
            heapify(forwards)
            self.room[rank] -= 1
            return best[1]
        if self.heaps["W"][rank]:
            self.room[rank] += 1
            return heappop(self.heaps["W"][rank])[1]
        return None

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether a rank may run the next forward of one of its stages."""
        done = self.done["F"]
        return self.later[stage] < self.room[rank] and (
            stage == self.last or done[stage] - done[stage + 1] < self.unread
        )

    def tick(self, taken: Sequence[Action]) -> set[int]:
        """Makes the results of a tick available; returns the ranks that may run something next. If
        no rank ran anything, time passes until the next message arrives."""
        self.now = self.now + 1 if taken or not self.crossing else self.crossing[0][0]
        for stage, kind, _ in taken:
            self.done[kind][stage] += 1
            self.offered.discard((kind, stage))
        awake = set()
        for stage, kind, _ in taken:
            awake.add(self.rank_of[stage])
            self._offer(kind, stage)
            if kind == "F":
                self._offer("I", stage)
                reader = stage + 1
                if stage > 0 and self.message:
                    awake.add(self.rank_of[stage - 1])  # has one unread forward less
            elif kind == "I":
                self._offer("W", stage)
                reader = stage - 1
            else:
                continue
            if 0 <= reader <= self.last:
                self._send(kind, stage, reader)
        while self.crossing and self.crossing[0][0] <= self.now:
            _, kind, reader = heappop(self.crossing)
            self.arrived[kind][reader] += 1
            self._offer(kind, reader)
            awake.add(self.rank_of[reader])
        return awake

    def _send(self, kind: Kind, stage: int, reader: int) -> None:
        """Lets the result of an action cross to the stage that reads it."""
        channel, arrives = (self.rank_of[stage], self.rank_of[reader]), self.now
        if channel[0] != channel[1]:
            arrives = self.free[channel] = max(self.free[channel], self.now) + self.message
        heappush(self.crossing, (arrives, kind, reader))

    def _offer(self, kind: Kind, stage: int) -> None:
        """Adds the next action of a stage to what its rank can run, once its inputs are there."""
        number = self.done[kind][stage]
        if number >= self._ready(kind, stage) or (kind, stage) in self.offered:
            return
        self.offered.add((kind, stage))
        action = Action(stage, kind, number)
        key = (number, -stage) if kind == "W" else self.urgency(action)
        heappush(self.heaps[kind][self.rank_of[stage]], (key, action))

    def _ready(self, kind: Kind, stage: int) -> int:
        if kind == "F":
            return self.arrived["F"][stage]
        if kind == "W":
            return self.done["I"][stage]
        forwards = self.done["F"][stage]
        return forwards if stage == self.last else min(forwards, self.arrived["I"][stage])


def _joined(actions: Sequence[Action]) -> list[Action]:
    """Replaces adjacent I and W of the first stage by one B: no rank waits for its I."""
    joined: list[Action] = []
    for action in actions:
        if action.kind == "W" and action.stage == 0 and joined[-1] == Action(0, "I", action.microbatch):
            joined[-1] = Action(0, "B", action.microbatch)
        else:
            joined.append(action)
    return joined
