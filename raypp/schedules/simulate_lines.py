"""Simulates a program with its messages: a message crosses once its receive is posted."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Literal

from raypp.schedules.action import KINDS, Action, Program, stages_with_backward
from raypp.schedules.communication import Line, Message, Receive
from raypp.schedules.simulate import Slot, StageTimes, Timeline, peaks_of


def simulate_lines(program: Program, times: StageTimes, lines: Mapping[int, Line]) -> Timeline:
    """Simulates as `schedules.simulate`, but a receive is posted at the end of the action before.


    Args:
        program: Actions of every rank; `check_program` finds no problem in it.
        times: Times of the stages and messages.
        lines: The program with its messages (`schedules.posting`).

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
    busy = [sum(slot.end - slot.start for slot in run.slots[rank]) for rank in sorted(program)]
    return Timeline(makespan, busy, [makespan - time for time in busy], *peaks_of(program), lambda: run.slots)


class _Run:
    """The state of a simulation: the position of every rank and the arrival times of messages."""

    def __init__(self, program: Program, times: StageTimes, num_stages: int, lines: Mapping[int, Line]) -> None:
        self.program, stages = program, range(num_stages)
        self.seconds = {kind: [times.of(Action(stage, kind, 0)) for stage in stages] for kind in KINDS}
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
        self.receives = {rank: _receives(line) for rank, line in lines.items()}
        self.posted: dict[Message, float] = {}
        self.sent: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self.awake: deque[int] = deque()
        self._queued: set[int] = set()

    def wake(self, rank: int) -> None:
        """Notes that a rank may be able to continue."""
        if rank not in self._queued:
            self._queued.add(rank)
            self.awake.append(rank)

    def advance(self, rank: int) -> None:
        """Runs a rank as far as it can."""
        self._queued.discard(rank)
        inputs, seconds, takers, rank_of = self.inputs, self.seconds, self.takers, self.rank_of
        actions, slots, clock = self.program[rank], self.slots[rank], self.clock[rank]
        done = self.position[rank]
        while done < len(actions):
            action = actions[done]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
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
                link = rank, rank_of[to]
                self.sent[link].append((Message(direction, stage, microbatch), clock))
                self._cross(*link)
        self.clock[rank], self.position[rank] = clock, done

    def _arrive(self, direction: Literal["F", "B"], stage: int, microbatch: int, time: float) -> None:
        arrivals = self.inputs[direction][stage]
        assert arrivals is not None
        arrivals[microbatch] = time

    def _post(self, rank: int, position: int) -> None:
        """Posts the receives of a rank that precede its action at `position`."""
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
