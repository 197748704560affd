"""Buffers a rank's reports until the controller has written them to the store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.observe.json_lines import LogLine
from raypp.records import Event, Seat, StepReport

MOST_KEPT = 20_000
"""Most steps, events and log lines (each) that are kept while the controller is away; the oldest
are dropped."""


class ReportBuffer:
    """Steps, events and log lines of one rank in one seat, sent in batches.

    A controller that is killed loses what it had not written. Therefore the buffer keeps steps and
    events until an answer says that they are in the store, and sends them again to a restarted
    controller. It keeps log lines until they are sent.

    Thread-safe; one thread at a time sends.
    """

    def __init__(self, seat: Seat, most: int = MOST_KEPT) -> None:
        self._seat = seat
        self._most = most
        self._lock = threading.Lock()
        self._steps: deque[StepReport] = deque(maxlen=most)
        self._events: deque[Event] = deque(maxlen=most)
        self._logs: deque[LogLine] = deque(maxlen=most)
        self._sent: deque[ReportBatch] = deque(maxlen=most)
        self._number = 0
        self._incarnation = ""

    def add_step(self, report: StepReport) -> None:
        """Adds a finished step."""
        with self._lock:
            self._steps.append(report)

    def add_event(self, event: Event) -> None:
        """Adds an event."""
        with self._lock:
            self._events.append(event)

    def add_logs(self, lines: Iterable[LogLine]) -> None:
        """Adds lines of output."""
        with self._lock:
            self._logs.extend(lines)

    def next_batch(self, phase: str, idle_s: float) -> ReportBatch:
        """Takes everything that waits as the next batch; the caller then calls `sent` or
        `requeue`."""
        with self._lock:
            self._number += 1
            seat = self._seat
            steps, events, logs = tuple(self._steps), tuple(self._events), tuple(self._logs)
            for queue in (self._steps, self._events, self._logs):
                queue.clear()
        return ReportBatch(seat.attempt, seat.rank, self._number, phase, idle_s, steps, events, logs)

    def requeue(self, batch: ReportBatch) -> None:
        """Puts a batch that could not be sent before what is newer."""
        with self._lock:
            self._put_first(batch.steps, batch.events)
            self._logs = deque((*batch.logs, *self._logs), self._most)

    def sent(self, batch: ReportBatch, answer: BatchAnswer) -> None:
        """Drops what the answer to a batch says is in the store; after a controller restart, queues
        the rest again."""
        with self._lock:
            if answer.incarnation != self._incarnation:
                self._put_first(*self._sent_unwritten())
                self._sent.clear()
                self._incarnation = answer.incarnation
            while self._sent and self._sent[0].number <= answer.durable:
                self._sent.popleft()
            if batch.steps or batch.events:
                self._sent.append(batch)

    def unwritten(self) -> ReportBatch | None:
        """Returns everything that is not known to be in the store, in order; None when there is
        nothing."""
        with self._lock:
            steps, events = self._sent_unwritten()
            steps, events, logs = (*steps, *self._steps), (*events, *self._events), tuple(self._logs)
        if not (steps or events or logs):
            return None
        return ReportBatch(self._seat.attempt, self._seat.rank, self._number + 1, "", 0.0, steps, events, logs)

    def _sent_unwritten(self) -> tuple[tuple[StepReport, ...], tuple[Event, ...]]:
        steps = tuple(step for batch in self._sent for step in batch.steps)
        return steps, tuple(event for batch in self._sent for event in batch.events)

    def _put_first(self, steps: Iterable[StepReport], events: Iterable[Event]) -> None:
        self._steps = deque((*steps, *self._steps), self._most)
        self._events = deque((*events, *self._events), self._most)
