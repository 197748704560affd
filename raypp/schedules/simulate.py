"""Simulates a program: when each action runs, given the time of every action and message."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from raypp.schedules.action import Action, Kind, Program, stages_with_backward
from raypp.schedules.communication import Line, Message, Receive

_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StageTimes:
    """Times of one microbatch on every stage, in seconds or any other unit.

    Attributes:
        forward: Time of F, by stage.
        backward: Time of B, by stage.
        input_share: The fraction of B that I takes.
        link: Time of one message between two ranks. A sequence gives it by boundary: `link[s]` is
            between stages s and s + 1.
        weight_share: The fraction of B that W takes. None: the rest. I and W together may take
            longer than B.
        first_whole: True: on the first stage, W takes the time of B and I takes none, as in torch:
            its input needs no gradient.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    input_share: float = 0.5
    link: float | Sequence[float] = 0.0
    weight_share: float | None = None
    first_whole: bool = False

    @classmethod
    def equal(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, link: float = 0.0) -> StageTimes:
        """Returns equal times for all stages. By default, a backward takes twice its forward."""
        return cls([forward] * num_stages, [backward] * num_stages, link=link)

    def message(self, boundary: int) -> float:
        """Returns the time of a message between stages `boundary` and `boundary + 1`."""
        return self.link if isinstance(self.link, int | float) else self.link[boundary]

    def of(self, action: Action) -> float:
        """Returns the time of an action."""
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
    """The result of a simulation.

    Attributes:
        slots: The actions of every rank with their times, in order.
        makespan: End of the last action.
        idle: Idle time of every rank between 0 and the makespan.
        in_flight: Peak number of microbatches in flight on each stage: the forward is done, the
            backward (B, or W) is not.
        in_flight_on_rank: The same for each rank, summed over its stages at one time.
    """

    slots: Mapping[int, Sequence[Slot]]
    makespan: float
    idle: Sequence[float]
    in_flight: Sequence[int]
    in_flight_on_rank: Sequence[int]

    @property
    def bubble(self) -> float:
        """Idle time as a fraction of the time of all ranks."""
        return sum(self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0.0


def simulate(program: Program, times: StageTimes, lines: Mapping[int, Line] | None = None) -> Timeline:
    """Simulates a program.

    A rank runs its actions in order, each as soon as its input has arrived. Sends never block a
    rank. Messages from one rank to another cross one after the other; the two directions are
    independent. Stages on the same rank pass results without delay.

    Args:
        program: Actions of every rank; `check_program` finds no problem in it.
        times: Times of the stages and messages.
        lines: The program with its messages (`schedules.posting`). A message then crosses once its
            receive is posted, at the end of the action before it. None: receives delay nothing.

    Raises:
        ValueError: The program deadlocks.
    """
    num_stages = 1 + max(action.stage for actions in program.values() for action in actions)
    run = _Run(program, times, num_stages, lines)
    for rank in program:
        run.wake(rank)
    while run.awake:
        run.advance(run.awake.popleft())
    waits = [str(actions[run.position[r]]) for r, actions in program.items() if run.position[r] < len(actions)]
    if waits:
        raise ValueError(f"the program deadlocks: its ranks hang at {', '.join(waits)}")
    makespan = max(run.clock.values())
    idle = [makespan - sum(slot.end - slot.start for slot in run.slots[rank]) for rank in sorted(program)]
    in_flight, on_rank = _peaks(program)
    return Timeline(run.slots, makespan, idle, in_flight, on_rank)


class _Run:
    """The state of a simulation: the position of every rank and the arrival times of messages."""

    def __init__(self, program: Program, times: StageTimes, num_stages: int, lines: Mapping[int, Line] | None) -> None:
        self.program, stages = program, range(num_stages)
        self.seconds = {kind: [times.of(Action(stage, kind, 0)) for stage in stages] for kind in _KINDS}
        self.messages = [times.message(boundary) for boundary in range(num_stages - 1)]
        self.rank_of = {action.stage: rank for rank, actions in program.items() for action in actions}
        self.position = dict.fromkeys(program, 0)
        self.clock = dict.fromkeys(program, 0.0)
        self.slots: dict[int, list[Slot]] = {rank: [] for rank in program}
        # By direction and stage: when the input of a microbatch arrives; None: it needs none.
        self.inputs: dict[str, list[dict[int, float] | None]] = {
            "F": [{} if stage else None for stage in stages],
            "B": [{} if stage < num_stages - 1 else None for stage in stages],
            "W": [None] * num_stages,
        }
        # By direction and stage: the stage that takes the output; None: nobody does.
        backward = stages_with_backward(program)
        self.takers: dict[str, list[int | None]] = {
            "F": [stage + 1 if stage + 1 < num_stages else None for stage in stages],
            "B": [stage - 1 if stage - 1 in backward else None for stage in stages],
            "W": [None] * num_stages,
        }
        self.inputs["I"], self.takers["I"] = self.inputs["B"], self.takers["B"]
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.receives = None if lines is None else {rank: _receives(line) for rank, line in lines.items()}
        self.posted: dict[Message, float] = {}
        self.sent: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self.awake: deque[int] = deque()
        self._queued: set[int] = set()

    def wake(self, rank: int) -> None:
        """Notes that a rank may be able to go on."""
        if rank not in self._queued:
            self._queued.add(rank)
            self.awake.append(rank)

    def advance(self, rank: int) -> None:
        """Runs a rank as far as it can."""
        self._queued.discard(rank)
        inputs, seconds, takers, rank_of = self.inputs, self.seconds, self.takers, self.rank_of
        actions, slots, clock, posting = (
            self.program[rank],
            self.slots[rank],
            self.clock[rank],
            self.receives is not None,
        )
        done = self.position[rank]
        while done < len(actions):
            action = actions[done]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if posting:
                self.clock[rank] = clock
                self._post(rank, done)
            start = clock
            if (arrivals := inputs[kind][stage]) is not None:
                if (ready := arrivals.get(microbatch)) is None:
                    break
                start = max(clock, ready)
            clock = start + seconds[kind][stage]
            slots.append(Slot(action, start, clock))
            done += 1
            if (to := takers[kind][stage]) is None:
                continue
            direction: Literal["F", "B"] = "F" if kind == "F" else "B"
            if rank_of[to] == rank:
                self._arrive(direction, to, microbatch, clock)
            else:
                self.position[rank] = done
                self._send(rank, direction, stage, to, microbatch, clock)
        self.clock[rank], self.position[rank] = clock, done

    def _send(
        self, rank: int, direction: Literal["F", "B"], stage: int, to: int, microbatch: int, arrives: float
    ) -> None:
        peer = self.rank_of[to]
        link = rank, peer
        if self.receives is not None:
            self.sent[link].append((Message(direction, stage, microbatch), arrives))
            self._cross(rank, peer)
            return
        # A link has one sender, which runs its actions in order, so this is the order of messages.
        arrives = max(arrives, self.link_free[link]) + self.messages[min(stage, to)]
        self.link_free[link] = arrives
        if peer not in self._queued:
            self.wake(peer)
        self._arrive(direction, to, microbatch, arrives)

    def _arrive(self, direction: Literal["F", "B"], stage: int, microbatch: int, time: float) -> None:
        arrivals = self.inputs[direction][stage]
        assert arrivals is not None
        arrivals[microbatch] = time

    def _post(self, rank: int, position: int) -> None:
        """Posts the receives of a rank that precede its action at `position`."""
        assert self.receives is not None
        for message in self.receives[rank].pop(position, ()):
            self.posted[message] = self.clock[rank]
            self._cross(self.rank_of[message.stage], rank)

    def _cross(self, source: int, to: int) -> None:
        """Finds when the messages from one rank to another arrive, as far as is known."""
        sent = self.sent[source, to]
        while sent and sent[0][0] in self.posted:
            message, ready = sent.popleft()
            begins = max(ready, self.link_free[source, to], self.posted[message])
            arrives = begins + self.messages[min(message.stage, message.to_stage)]
            self.link_free[source, to] = arrives
            self.wake(to)
            self._arrive(message.kind, message.to_stage, message.microbatch, arrives)


def _receives(line: Line) -> dict[int, list[Message]]:
    """Returns the receives of a line by the position, among its actions, of the next action."""
    found: dict[int, list[Message]] = defaultdict(list)
    position = 0
    for item in line:
        if isinstance(item, Action):
            position += 1
        elif isinstance(item, Receive):
            found[position].append(item.message)
    return found


def _peaks(program: Program) -> tuple[list[int], list[int]]:
    """Returns the most forwards without their backward at one time: of each stage, of each rank.

    A stage without backwards keeps nothing.
    """
    by_stage: dict[int, int] = {}
    by_rank = []
    for rank in sorted(program):
        backward = {action.stage for action in program[rank] if action.kind != "F"}
        now: dict[int, int] = defaultdict(int)
        peaks: dict[int, int] = {action.stage: 0 for action in program[rank]}
        together = peak = 0
        for action in program[rank]:
            if (stage := action.stage) not in backward:
                continue
            if action.kind == "F":
                now[stage] += 1
                together += 1
                peaks[stage] = max(peaks[stage], now[stage])
                peak = max(peak, together)
            elif action.kind != "I":
                now[stage] -= 1
                together -= 1
        by_stage.update(peaks)
        by_rank.append(peak)
    return [by_stage[stage] for stage in sorted(by_stage)], by_rank
