"""What a rank has to tell, until a controller is known to have written it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from raypp.control.protocol import Answer, Batch
from raypp.observe.json_lines import LogLine
from raypp.records import Event, Seat, StepReport

MOST_KEPT = 20_000
"""Steps, events and log lines (of each) that wait for a controller that is away; the oldest go first."""


class Outbox:
    """Steps, events and log lines of one rank in one seat, handed over in batches.

    A controller that is killed loses what it had not written. So steps and events are kept until an answer says that
    they are in the store, and told again to a controller's next life. Log lines are kept until they are handed over.

    Thread-safe; one thread at a time hands over.
    """

    def __init__(self, seat: Seat, most: int = MOST_KEPT) -> None:
        self._seat = seat
        self._most = most
        self._lock = threading.Lock()
        self._steps: deque[StepReport] = deque(maxlen=most)
        self._events: deque[Event] = deque(maxlen=most)
        self._logs: deque[LogLine] = deque(maxlen=most)
        self._unsure: deque[Batch] = deque(maxlen=most)
        self._number = 0
        self._life = ""

    def add_step(self, report: StepReport) -> None:
        with self._lock:
            self._steps.append(report)

    def add_event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def add_logs(self, lines: Iterable[LogLine]) -> None:
        with self._lock:
            self._logs.extend(lines)

    def take(self, phase: str, idle_s: float) -> Batch:
        """Everything that waits, as the next batch; `delivered` or `returned` must follow."""
        with self._lock:
            self._number += 1
            seat = self._seat
            steps, events, logs = tuple(self._steps), tuple(self._events), tuple(self._logs)
            for kept in (self._steps, self._events, self._logs):
                kept.clear()
        return Batch(seat.attempt, seat.rank, self._number, phase, idle_s, steps, events, logs)

    def returned(self, batch: Batch) -> None:
        """Nobody took the batch: it waits again, before what is newer."""
        with self._lock:
            self._put_before(batch.steps, batch.events)
            self._logs = deque((*batch.logs, *self._logs), self._most)

    def delivered(self, batch: Batch, answer: Answer) -> None:
        """A controller took the batch, and said what it has written."""
        with self._lock:
            if answer.life != self._life:
                self._put_before(*self._not_written())
                self._unsure.clear()
                self._life = answer.life
            while self._unsure and self._unsure[0].number <= answer.durable:
                self._unsure.popleft()
            if batch.steps or batch.events:
                self._unsure.append(batch)

    def left_over(self) -> Batch | None:
        """What no controller is known to have written, in order; None when that is nothing."""
        with self._lock:
            steps, events = self._not_written()
            steps, events, logs = (*steps, *self._steps), (*events, *self._events), tuple(self._logs)
        if not (steps or events or logs):
            return None
        return Batch(self._seat.attempt, self._seat.rank, self._number + 1, "", 0.0, steps, events, logs)

    def _not_written(self) -> tuple[tuple[StepReport, ...], tuple[Event, ...]]:
        steps = tuple(step for batch in self._unsure for step in batch.steps)
        return steps, tuple(event for batch in self._unsure for event in batch.events)

    def _put_before(self, steps: Iterable[StepReport], events: Iterable[Event]) -> None:
        self._steps = deque((*steps, *self._steps), self._most)
        self._events = deque((*events, *self._events), self._most)
