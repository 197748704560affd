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

from raypp.schedules.action import Action, Kind

Urgency = Callable[[Action], tuple[int, ...]]
"""Sort key of the F or I actions of one rank: the smallest runs first."""


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
    clock = _Clock(placement, microbatches)
    program: dict[int, list[Action]] = {rank: [] for rank in range(len(placement))}
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    awake = set(program)  # a rank that could do nothing waits for another one's action
    while awake:
        taken: list[Action] = []
        following: set[int] = set()
        for rank in sorted(awake):
            action = clock.choose(placement[rank], room[rank], urgency)
            if action is not None:
                program[rank].append(action)
                taken.append(action)
                following.add(rank)
        for action in taken:  # only now: results of this tick are available at the next
            clock.next_of[action.kind, action.stage] += 1
            reader = action.stage + {"F": 1, "I": -1}.get(action.kind, 0)
            if reader in rank_of:
                following.add(rank_of[reader])
        awake = following
    return {rank: _joined(actions) for rank, actions in program.items()}


class _Clock:
    """The progress of every stage: the next microbatch for each kind of action."""

    def __init__(self, placement: Sequence[Sequence[int]], microbatches: int) -> None:
        self.microbatches = microbatches
        stages = [stage for held in placement for stage in held]
        self.last = max(stages)
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.next_of: dict[tuple[Kind, int], int] = {(kind, stage): 0 for kind in kinds for stage in stages}

    def choose(self, stages: Sequence[int], room: int, urgency: Urgency) -> Action | None:
        """Returns the most urgent action that a rank can run in this tick, if any."""
        inputs = [Action(s, "I", self.next_of["I", s]) for s in stages if self._can_go_back(s)]
        if inputs:
            return min(inputs, key=urgency)
        held = sum(self.next_of["F", s] - self.next_of["W", s] for s in stages)
        forwards = [
            Action(s, "F", self.next_of["F", s])
            for later, s in enumerate(reversed(stages))
            if held + later < room and self._can_go_forward(s)
        ]
        if forwards:
            return min(forwards, key=urgency)
        weights = [Action(s, "W", self.next_of["W", s]) for s in stages if self._owes_weights(s)]
        return min(weights, key=lambda action: (action.microbatch, -action.stage), default=None)

    def _can_go_forward(self, stage: int) -> bool:
        index = self.next_of["F", stage]
        return index < self.microbatches and (stage == 0 or index < self.next_of["F", stage - 1])

    def _can_go_back(self, stage: int) -> bool:
        index = self.next_of["I", stage]
        return index < self.next_of["F", stage] and (stage == self.last or index < self.next_of["I", stage + 1])

    def _owes_weights(self, stage: int) -> bool:
        return self.next_of["W", stage] < self.next_of["I", stage]


def _joined(actions: Sequence[Action]) -> list[Action]:
    """Replaces adjacent I and W of the first stage by one B: no rank waits for its I."""
    found: list[Action] = []
    for action in actions:
        if action.kind == "W" and action.stage == 0 and found[-1] == Action(0, "I", action.microbatch):
            found[-1] = Action(0, "B", action.microbatch)
        else:
            found.append(action)
    return found
