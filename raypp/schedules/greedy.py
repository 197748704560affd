"""Split-backward programs by list scheduling: a clock ticks, and every idle rank takes the most urgent thing it can.

All parts (F, I, W) are taken to last one tick and messages to arrive at the next. The order of urgency: I, because
ranks above wait for it; then F, as long as the rank may hold another microbatch; then W, which nobody waits for. So W
fills what would be a bubble (Qi et al., arXiv:2401.10241).

No order made here can hang. A rank may take the forward of its n-th last stage only while it keeps n places free for
its later stages, and each stage takes microbatches in order; so the oldest unfinished microbatch can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypp.schedules.action import Action, Kind

Urgency = Callable[[Action], tuple[int, ...]]
"""Of an F or I on one rank: the smallest goes first."""


def greedy_program(
    placement: Sequence[Sequence[int]], microbatches: int, room: Sequence[int], urgency: Urgency
) -> dict[int, list[Action]]:
    """The program of every rank.

    Args:
        placement: Stages of every rank, ascending.
        microbatches: Per step.
        room: Forwards each rank may hold whose W is not done; at least the number of its stages.
        urgency: Which of several possible forwards, or of several possible I, comes first.
    """
    clock = _Clock(placement, microbatches)
    program: dict[int, list[Action]] = {rank: [] for rank in range(len(placement))}
    while any(clock.next_of["W", stage] < microbatches for stages in placement for stage in stages):
        taken: list[Action] = []
        for rank, stages in enumerate(placement):
            action = clock.choose(stages, room[rank], urgency)
            if action is not None:
                program[rank].append(action)
                taken.append(action)
        for action in taken:  # only now: what ends in this tick is there for others in the next
            clock.next_of[action.kind, action.stage] += 1
    return {rank: _joined(actions) for rank, actions in program.items()}


class _Clock:
    """How far every stage is: the next microbatch of each kind of work."""

    def __init__(self, placement: Sequence[Sequence[int]], microbatches: int) -> None:
        self.microbatches = microbatches
        stages = [stage for held in placement for stage in held]
        self.last = max(stages)
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.next_of: dict[tuple[Kind, int], int] = {(kind, stage): 0 for kind in kinds for stage in stages}

    def choose(self, stages: Sequence[int], room: int, urgency: Urgency) -> Action | None:
        """The most urgent thing a rank can do in this tick."""
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
    """The same with I and W of the first stage made one B where they are neighbours: nobody waits for its I."""
    found: list[Action] = []
    for action in actions:
        if action.kind == "W" and action.stage == 0 and found[-1] == Action(0, "I", action.microbatch):
            found[-1] = Action(0, "B", action.microbatch)
        else:
            found.append(action)
    return found
