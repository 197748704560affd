"""Simulates a program: when each action runs, given the time of every action and message.

A program is put into one order that does not depend on times, so every simulation is one pass over
it. Periods and replicas are not merged: sums in another order change the last bits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from raypp.planning.schedules.action import KINDS, Action, Program, stages_with_backward
from raypp.planning.schedules.communication import Line, Message, Receive
from raypp.planning.schedules.shared_cards import Channel, SharedCards, Step
from raypp.planning.schedules.waiting import Waiting, waiting_sends, without_repeats


@dataclass(frozen=True)
class StageTimes:
    """Times of one microbatch on every stage, in seconds or any other unit.

    Attributes:
        input_share: The fraction of B that I takes.
        link: Time of one message between two ranks. A sequence gives it by boundary: `link[s]` is
            between stages s and s + 1.
        weight_share: The fraction of B that W takes. None: the rest. I and W together may take
            longer than B.
        first_whole: True: on the first stage, W takes the time of B and I takes none, as in torch:
            its input needs no gradient.
        cards: The network card of every pipeline rank, as any number; ranks on one host have the
            same. Messages that leave or reach a card at the same time share its rate
            (`schedules.shared_cards`). None, for all ranks or for one: its channels share nothing.
        spread: Times of actions vary by this fraction, up or down (`Simulator.run_varied`).
        link_spread: Times of messages do.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    input_share: float = 0.5
    link: float | Sequence[float] = 0.0
    weight_share: float | None = None
    first_whole: bool = False
    cards: Sequence[int | None] | None = None
    spread: float = 0.0
    link_spread: float = 0.0

    @classmethod
    def equal(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, link: float = 0.0) -> StageTimes:
        """Returns equal times for all stages. By default, a backward takes twice its forward."""
        return cls([forward] * num_stages, [backward] * num_stages, link=link)

    def message(self, boundary: int) -> float:
        """Returns the time of a message between stages `boundary` and `boundary + 1`."""
        return self.link if isinstance(self.link, int | float) else self.link[boundary]

    def of(self, action: Action) -> float:
        match action.kind:
            case "F":
                return self.forward[action.stage]
            case "B":
                return self.backward[action.stage]
            case "I" | "W" if self.first_whole and action.stage == 0:
                return self.backward[0] if action.kind == "W" else 0.0
            case "I":
                return self.backward[action.stage] * self.input_share
            case "W":
                rest = 1 - self.input_share
                return self.backward[action.stage] * (rest if self.weight_share is None else self.weight_share)


class Slot(NamedTuple):
    """One action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation. `makespan`: end of the last action. `idle`: idle time of every
    rank between 0 and the makespan. `in_flight`: peak number of microbatches in flight on each
    stage: the forward is done, the backward (B, or W) is not. `in_flight_on_rank`: the same for
    each rank, summed over its stages at one time."""

    makespan: float
    busy: Sequence[float]
    idle: Sequence[float]
    in_flight: Sequence[int]
    in_flight_on_rank: Sequence[int]
    _listed: Callable[[], dict[int, list[Slot]]] = field(repr=False, compare=False)

    @cached_property
    def slots(self) -> Mapping[int, Sequence[Slot]]:
        """The actions of every rank with their times, in order."""
        return self._listed()

    @property
    def bubble(self) -> float:
        """Idle time as a fraction of the time of all ranks."""
        return sum(self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0.0


class DeadlockError(ValueError):
    """Ranks of a program wait for each other. `hangs`: which, at which action, and for what."""

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        super().__init__(f"the program deadlocks: its ranks hang at {', '.join(map(str, waiting.values()))}")
        needs = {
            rank: Action(stage - 1, "F", microbatch) if kind == "F" else Action(stage + 1, "B", microbatch)
            for rank, (stage, kind, microbatch) in waiting.items()
        }
        self.hangs = [
            f"rank {rank} hangs at {action}: it needs {needs[rank]} first" for rank, action in waiting.items()
        ]


def simulate(program: Program, times: StageTimes, lines: Mapping[int, Line] | None = None) -> Timeline:
    """Simulates a program once; see `Simulator`. Raises DeadlockError: the program deadlocks."""
    return Simulator(program).run(times, lines)


_Step = tuple[int, int, int, int, int]
"""An action, by the numbers of all that its time depends on.

- the index of its rank, in the order of the program
- the index of its time
- the number of its input; 0: it needs none
- the index of the channel that its result crosses; `_STAYS` on its rank, or `_UNUSED`
- the index of the message's time, if it crosses a channel
"""
_STAYS, _UNUSED = -1, -2
_NOBODY = -1

_Numbers = dict[int, int]
"""Of the results of one kind that a stage takes: the number of each, by microbatch."""

_Flow = tuple[int, _Numbers | None, _Numbers | None, int, int, int]
"""The index of an action's time, the results that it takes and gives, the channel, the index of the
message's time, and the rank that may wait for it."""


class Simulator:
    """A program, prepared to be simulated with several times.

    A rank runs its actions in order, each as soon as its input has arrived. Sends never block a
    rank. Messages from one rank to another cross one after the other; the two directions are
    independent. Messages between other pairs of ranks are, too, unless `StageTimes.cards` says
    which cards they share. Stages on the same rank pass results without delay. Receives delay
    nothing, unless the lines of the ranks say when they are posted.

    What an action waits for does not depend on times. So all actions are put into one order, in
    which each follows those that it waits for, and a simulation is one pass over that order. With
    shared cards or posted receives, it follows events in the order of their times. `program`:
    actions of every rank; `check_program` finds no problem in it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.actions = sum(map(len, program.values()))
        self._stages = 1 + max(action.stage for actions in program.values() for action in actions)
        self._channels: dict[tuple[int, int], int] = {}

    def run(self, times: StageTimes, lines: Mapping[int, Line] | None = None) -> Timeline:
        """Simulates the program with given times of actions and messages. `times`: these times.
        `lines`: the program with its messages (`schedules.posting`): a receive is posted at the end
        of the action before it, and its message crosses after that. None: receives delay nothing.
        Raises DeadlockError: the program deadlocks."""
        shared = times.cards is not None and any(times.message(boundary) for boundary in range(self._stages - 1))
        if shared or lines is not None:
            return self._run_by_events(times, None, lines)
        seconds = [times.of(Action(stage, kind, 0)) for stage in range(self._stages) for kind in KINDS]
        messages = [times.message(boundary) for boundary in range(self._stages - 1)]
        clock, busy = [0.0] * len(self.program), [0.0] * len(self.program)
        steps = self.in_order
        free = [0.0] * len(self._channels)
        arrivals = [0.0]  # in the order of the results
        starts: list[float] = []
        ends: list[float] = []
        for rank, which, needs, channel, boundary in steps:
            start = clock[rank]
            if needs and arrivals[needs] > start:
                start = arrivals[needs]
            clock[rank] = end = start + seconds[which]
            busy[rank] += end - start
            starts.append(start)
            ends.append(end)
            if channel >= 0:
                # A channel has one sender, which runs its actions in order.
                free[channel] = arrives = (free[channel] if free[channel] > end else end) + messages[boundary]
                arrivals.append(arrives)
            elif channel == _STAYS:
                arrivals.append(end)
        makespan = max(clock)
        by_rank = [busy[index] for _, index in sorted((rank, index) for index, rank in enumerate(self.program))]
        idle = [makespan - time for time in by_rank]
        return Timeline(makespan, by_rank, idle, *self.peaks, lambda: self._slots(starts, ends))

    def run_varied(self, times: StageTimes, draws: int) -> list[float]:
        """Returns the makespans with times drawn at random, within `spread` and `link_spread`. The
        same on every rank and machine, and of all programs of the same stages and microbatches: a
        draw gives each action and its message their times. Without a spread: one makespan."""
        if not (times.spread or times.link_spread):
            return [self.run(times).makespan]
        return [self._run_by_events(times, random.Random(draw)).makespan for draw in range(draws)]

    def steps(self, times: StageTimes, draw: random.Random | None = None) -> tuple[list[list[Step]], list[Channel]]:
        """Returns what `SharedCards` takes: the steps of every rank, and the channels. `times`:
        times of actions and messages. `draw`: draws what varies; None: nothing does."""
        seconds = [times.of(Action(stage, kind, 0)) for stage in range(self._stages) for kind in KINDS]
        messages = [times.message(boundary) for boundary in range(self._stages - 1)]
        lines: list[list[Step]] = [[] for _ in self.program]
        actions = [iter(line) for line in self.program.values()]
        factors: list[list[tuple[float, float]]] = []
        if draw is not None:
            microbatches = 1 + max(action.microbatch for line in self.program.values() for action in line)
            for _ in range(microbatches):
                drawn = [(2 * draw.random() - 1, 2 * draw.random() - 1) for _ in seconds]
                factors.append([(1 + times.spread * one, 1 + times.link_spread * other) for one, other in drawn])
        results = 0
        for rank, which, needs, channel, boundary in self.in_order:
            results += channel != _UNUSED
            microbatch = next(actions[rank]).microbatch
            slower, later = factors[microbatch][which] if factors else (1.0, 1.0)
            gives, message = (results, messages[boundary]) if channel != _UNUSED else (0, 0.0)
            lines[rank].append(Step(needs, gives, channel, seconds[which] * slower, message * later))
        return lines, list(self._channels)

    def _posts(self, lines: Mapping[int, Line], steps: Sequence[Sequence[Step]]) -> list[dict[int, list[int]]]:
        """Returns the numbers of the results whose receives precede each step, by rank and step."""
        gives = {
            Message("F" if action.kind == "F" else "B", action.stage, action.microbatch): step.gives
            for actions, line in zip(self.program.values(), steps, strict=True)
            for action, step in zip(actions, line, strict=True)
            if step.channel >= 0
        }
        tables: list[dict[int, list[int]]] = []
        for rank in self.program:
            position, posts = 0, dict[int, list[int]]()
            for item in lines[rank]:
                if isinstance(item, Receive):
                    posts.setdefault(position, []).append(gives[item.message])
                position += isinstance(item, Action)
            tables.append(posts)
        return tables

    def _run_by_events(
        self, times: StageTimes, draw: random.Random | None, with_messages: Mapping[int, Line] | None = None
    ) -> Timeline:
        lines, channels = self.steps(times, draw)
        cards = times.cards or [None] * len(lines)
        posts = None if with_messages is None else self._posts(with_messages, lines)
        run = SharedCards(lines, channels, [cards[rank] for rank in self.program], posts)
        run.run()
        slots = dict(zip(self.program, run.slots, strict=True))
        makespan = max(line[-1][1] for line in slots.values())
        busy = [sum(end - start for start, end in slots[rank]) for rank in sorted(slots)]
        idle = [makespan - time for time in busy]

        def listed() -> dict[int, list[Slot]]:
            return {
                rank: [Slot(action, *slot) for action, slot in zip(self.program[rank], times, strict=True)]
                for rank, times in slots.items()
            }

        return Timeline(makespan, busy, idle, *self.peaks, listed)

    @cached_property
    def peaks(self) -> tuple[list[int], list[int]]:
        """The most microbatches in flight at one time: of each stage, and of each rank."""
        return peaks_of(self.program)

    @cached_property
    def waiting(self) -> dict[int, dict[Action, Waiting]]:
        """The messages that wait on every rank while it runs an action."""
        return waiting_sends(self.program)

    @cached_property
    def situations(self) -> dict[int, list[Action]]:
        """The actions of every rank, without those that repeat situations (`without_repeats`)."""
        return {rank: without_repeats(actions, self.waiting[rank]) for rank, actions in self.program.items()}

    def _slots(self, starts: list[float], ends: list[float]) -> dict[int, list[Slot]]:
        slots: dict[int, list[Slot]] = {rank: [] for rank in self.program}
        rows = [(slots[rank], iter(actions)) for rank, actions in self.program.items()]
        for (rank, *_), start, end in zip(self.in_order, starts, ends, strict=True):
            row, actions = rows[rank]
            row.append(Slot(next(actions), start, end))
        return slots

    @cached_property
    def in_order(self) -> list[_Step]:
        """All actions, each after those that it waits for. Raises DeadlockError: there is none."""
        lines = list(self.program.values())
        table = self._flows()
        steps: list[_Step] = []
        position, results = [0] * len(lines), 0
        awake = deque(range(len(lines)))
        queued = {_NOBODY, *awake}
        while awake:
            rank = awake.popleft()
            queued.discard(rank)
            line = lines[rank]
            for at in range(position[rank], len(line)):
                stage, kind, microbatch = line[at]
                which, inputs, outputs, channel, boundary, peer = table[kind][stage]
                needs = 0
                if inputs is not None and not (needs := inputs.get(microbatch, 0)):
                    position[rank] = at
                    break
                if outputs is not None:
                    results += 1
                    outputs[microbatch] = results
                    if peer not in queued:
                        queued.add(peer)
                        awake.append(peer)
                steps.append((rank, which, needs, channel, boundary))
            else:
                position[rank] = len(line)
        hang = {rank: line[at] for rank, line, at in zip(self.program, lines, position, strict=True) if at < len(line)}
        if hang:
            raise DeadlockError(hang)
        return steps

    def _flows(self) -> dict[str, list[_Flow]]:
        """Returns what actions take and give, by kind and stage."""
        rank_of = {a.stage: index for index, actions in enumerate(self.program.values()) for a in actions}
        last, backward = self._stages - 1, stages_with_backward(self.program)
        forwards: list[_Numbers] = [{} for _ in range(self._stages)]
        gradients: list[_Numbers] = [{} for _ in range(self._stages)]
        table: dict[str, list[_Flow]] = {kind: [] for kind in KINDS}
        for number, kind in enumerate(KINDS):
            rows = table[kind]
            for stage in range(self._stages):
                which = stage * len(KINDS) + number
                to = stage + 1 if kind == "F" else stage - 1
                taken = to <= last if kind == "F" else to in backward
                if kind == "W" or stage not in rank_of:
                    rows.append((which, None, None, _UNUSED, 0, _NOBODY))
                    continue
                of = forwards if kind == "F" else gradients
                inputs = None if stage == (0 if kind == "F" else last) else of[stage]
                if not taken:
                    rows.append((which, inputs, None, _UNUSED, 0, _NOBODY))
                    continue
                channel, peer, link = _STAYS, _NOBODY, (rank_of[stage], rank_of[to])
                if link[0] != link[1]:
                    channel, peer = self._channels.setdefault(link, len(self._channels)), link[1]
                rows.append((which, inputs, of[to], channel, min(stage, to), peer))
        return table


def peaks_of(program: Program) -> tuple[list[int], list[int]]:
    """Returns the most forwards without their backward at one time: of each stage, of each rank. A
    stage without backwards keeps nothing."""
    by_stage: dict[int, int] = {}
    by_rank = []
    for rank in sorted(program):
        backward = {stage for stage, kind, _ in program[rank] if kind != "F"}
        now = dict.fromkeys(backward, 0)
        peaks = {stage: 0 for stage, _, _ in program[rank]}
        together = peak = 0
        for stage, kind, _ in program[rank]:
            if kind == "I" or stage not in backward:
                continue
            if kind == "F":
                now[stage] = held = now[stage] + 1
                together += 1
                if held > peaks[stage]:
                    peaks[stage] = held
                if together > peak:
                    peak = together
            else:
                now[stage] -= 1
                together -= 1
        by_stage.update(peaks)
        by_rank.append(peak)
    return [by_stage[stage] for stage in sorted(by_stage)], by_rank
