"""Split-backward programs by list scheduling: at each tick, each rank runs its most urgent action.

The scheduler assumes that every action (F, I, W) takes one tick and every message arrives by the
next. The order of urgency: I, because earlier pipeline ranks wait for it; then F, while the rank
may hold another microbatch; then W, which no rank waits for. So W fills what would otherwise be a
bubble (Qi et al., arXiv:2401.10241).

The resulting programs cannot deadlock. A rank starts the forward of its n-th last stage only if n
slots are free, so its later stages keep theirs. Each stage takes microbatches in order. So the
oldest unfinished microbatch can always continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from raypp.schedules.action import Action, Kind

Urgency = Callable[[Action], tuple[int, ...]]
"""Sort key of the F or I actions of one rank: the smallest runs first. No two may be equal."""


def greedy_program(
    placement: Sequence[Sequence[int]], microbatches: int, room: Sequence[int], urgency: Urgency
) -> dict[int, list[Action]]:
    """Builds the program of every rank.

    Args:
        placement: Stages of every rank, ascending.
        microbatches: Microbatches per step.
        room: For each rank, the most forwards whose W is not done; at least the number of its
            stages.
        urgency: Orders the forwards, or the I actions, that are possible at the same time.
    """
    clock = _Clock(placement, microbatches, room, urgency)
    program: dict[int, list[Action]] = {rank: [] for rank in range(len(placement))}
    awake = set(program)  # a rank that could do nothing waits for another one's action
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
    """The progress of every stage, and what each rank can run next.

    Every stage offers at most one action of each kind, that of its next microbatch. An action that
    is possible stays so until it is run; only the room for forwards changes.
    """

    def __init__(
        self, placement: Sequence[Sequence[int]], microbatches: int, room: Sequence[int], urgency: Urgency
    ) -> None:
        self.microbatches, self.urgency, self.room = microbatches, urgency, list(room)  # what is left
        stages = sum(map(len, placement))
        self.last = stages - 1
        self.rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
        self.later = {stage: later for held in placement for later, stage in enumerate(reversed(held))}
        self.done: dict[Kind, list[int]] = {kind: [0] * stages for kind in ("F", "I", "W")}
        self.offered: set[tuple[Kind, int]] = set()
        self.heaps: dict[Kind, list[_Heap]] = {kind: [[] for _ in placement] for kind in ("F", "I", "W")}
        self._offer("F", 0)

    def choose(self, rank: int) -> Action | None:
        """Takes the most urgent action that a rank can run in this tick, if any."""
        if self.heaps["I"][rank]:
            return heappop(self.heaps["I"][rank])[1]
        forwards, room = self.heaps["F"][rank], self.room[rank]
        if forwards and self.later[forwards[0][1].stage] < room:
            self.room[rank] -= 1
            return heappop(forwards)[1]
        possible = [entry for entry in forwards if self.later[entry[1].stage] < room] if room > 0 else []
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

    def tick(self, taken: Sequence[Action]) -> set[int]:
        """Makes the results of a tick available; returns the ranks that may run something next."""
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
            elif kind == "I":
                self._offer("W", stage)
                reader = stage - 1
            else:
                continue
            if 0 <= reader <= self.last:
                self._offer(kind, reader)
                awake.add(self.rank_of[reader])
        return awake

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
        """Returns how many microbatches have the inputs that an action needs."""
        if kind == "F":
            return self.microbatches if stage == 0 else self.done["F"][stage - 1]
        if kind == "W":
            return self.done["I"][stage]
        forwards = self.done["F"][stage]
        return forwards if stage == self.last else min(forwards, self.done["I"][stage + 1])


def _joined(actions: Sequence[Action]) -> list[Action]:
    """Replaces adjacent I and W of the first stage by one B: no rank waits for its I."""
    found: list[Action] = []
    for action in actions:
        if action.kind == "W" and action.stage == 0 and found[-1] == Action(0, "I", action.microbatch):
            found[-1] = Action(0, "B", action.microbatch)
        else:
            found.append(action)
    return found
