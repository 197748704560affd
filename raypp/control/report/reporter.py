"""The reporter of a rank under Ray: sends reports from a thread a few times a second, and keeps
them until the controller has written them to the store."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from raypp.control.credentials import scrubbed
from raypp.control.process_evidence import inside
from raypp.control.process_log import flush, say
from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.records import Event, Requests, Seat, StepReport
from raypp.state.run_records.json_lines import LogLine

_INTERVAL_S = 0.25
_INTERVAL_S_PER_RANK = 0.008  # 125 reports a second, of all ranks together
_LONGEST_INTERVAL_S = 10.0
_LONGEST_OF_RANK_0_S = 1.0  # its answers carry the operator's requests
_AWAY_S = 1.0
_ANSWER_S = 30.0
_IDLE_S = 2.0
_LONGEST_TRAIL = 4096
_LONGEST_LINE, _CUT = 64 << 10, b" (cut at 64 KiB)"
_RAY_PREFIXES = (":job_id:", ":actor_name:", ":task_name:")


MOST_KEPT = 20_000
"""Most steps, events and log lines (each) that are kept while the controller is away; the oldest
are dropped."""


class ControllerReporter:
    """A `Reporter` that reports to the run's controller. Each call carries what is new and returns
    what the operator wants, so the controller never has to call a worker that computes. `tails`:
    this process' output, read from where the last seat's reporter stopped. `on_answer`: called with
    the time of each of the controller's answers (`time.monotonic`)."""

    def __init__(
        self,
        controller: Any,
        seat: Seat,
        tails: tuple[LogTail, ...],
        on_answer: Callable[[float], None] = lambda _at: None,
    ) -> None:
        self._controller = controller
        self._pace_s = interval_s(seat.world_size)
        if seat.rank == 0:
            self._pace_s = min(self._pace_s, _LONGEST_OF_RANK_0_S)
        self._seat = seat
        self._tails = tails
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._phase = "starting"
        self._phase_since = time.monotonic()
        self._trail = _Trail()
        self._buffer = ReportBuffer(seat)
        self._stop = Requests()
        self._save_once = False
        self._trace_once = 0
        self.last_step = 0
        """The last step this rank reported as its phase."""
        self._rank_thread: int | None = None
        self._thread = threading.Thread(target=self._send_all, name="reporter", daemon=True)

    # The Reporter protocol ------------------------------------------------------------------------

    def phase(self, name: str, detail: str = "", reached: Callable[[], bool] | None = None) -> None:
        first = detail.partition(" ")[0]
        if name == "step" and first.isdigit():
            self.last_step = int(first)
        phase = f"{name} {detail}".strip()
        if reached is not None:
            self._trail.add(phase, reached, self._phase)
        self._phase = phase
        self._phase_since = time.monotonic()

    def step(self, report: StepReport) -> None:
        self._buffer.add_step(report)
        self._wake.set()

    def event(self, event: Event) -> None:
        self._buffer.add_event(event)
        self._wake.set()

    def requests(self) -> Requests:
        # A request to save or to trace is passed on once: ranks take the maximum over all.
        with self._lock:
            save, self._save_once = self._save_once, False
            trace, self._trace_once = self._trace_once, 0
            stop = self._stop
        return dataclasses.replace(stop, save=save, trace=0 if stop.stop else trace)

    # Sending and the end --------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Requests a last checkpoint and a stop, as an operator would, without a controller."""
        with self._lock:
            self._stop = Requests(stop=True, save_before_stop=True)

    def unwritten(self) -> ReportBatch | None:
        """Returns, after the end, the reports that are not known to be in the store."""
        return self._buffer.unwritten()

    def __enter__(self) -> ControllerReporter:
        self._rank_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sends the rest, including log lines; what cannot be sent is in `unwritten`."""
        flush()
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=_ANSWER_S)

    def _send_all(self) -> None:
        away = last = False
        while not last:
            last = self._closing
            self._wake.clear()
            if last:
                self.phase("ended")
            batch = self._batch()
            try:
                answer = self._sent(batch)
            except Exception as error:  # noqa: BLE001  a controller that is away must not disturb training
                self._buffer.requeue(batch)
                if not away:
                    say(f"the controller does not answer: {type(error).__name__}")
                away, pause_s = True, _AWAY_S
            else:
                away, pause_s = False, self._pace_s
                self._buffer.sent(batch, answer)
                self._apply(answer)
            if not last:
                self._wake.wait(pause_s)

    def _sent(self, batch: ReportBatch) -> BatchAnswer:
        answer: BatchAnswer = ray.get(self._controller.report.remote(batch), timeout=_ANSWER_S)
        return answer

    def _batch(self) -> ReportBatch:
        """Returns what is new, after what could not be sent last time."""
        for tail in self._tails:
            self._buffer.add_logs(tail.read(self._seat))
        phase, moved, reached = self._trail.look()
        idle_s = time.monotonic() - (moved if phase else max(moved, self._phase_since))
        batch = self._buffer.next_batch(phase or self._phase, idle_s)
        if phase:
            return dataclasses.replace(batch, reached=reached)
        if idle_s < _IDLE_S:
            return batch
        return dataclasses.replace(batch, inside=inside(self._rank_thread))

    def _apply(self, answer: BatchAnswer) -> None:
        requests = answer.requests
        self._on_answer(time.monotonic())
        with self._lock:
            self._save_once = self._save_once or requests.save
            self._trace_once = max(self._trace_once, requests.trace)
            if requests.stop:
                self._stop = requests


class _Trail:
    """What a device has come to of its host's queue. A mark says where it is until the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: deque[tuple[str, Callable[[], bool]]] = deque()
        self._at, self._moved, self._reached = "", 0.0, 0

    def add(self, phase: str, reached: Callable[[], bool], before: str) -> None:
        """Adds a mark of the host. `phase`: what the host queues next. `reached`: tells whether the
        device has come to it. `before`: what the device does before its first mark."""
        with self._lock:
            self._at = self._at or before
            if len(self._queued) >= _LONGEST_TRAIL:
                self._follow()
            self._queued.append((phase, reached))

    def look(self) -> tuple[str, float, int]:
        """Returns where the device is, "" if it waits for its host; when it came there; the number
        of marks it has come to."""
        with self._lock:
            self._follow()
            return self._at if self._queued else "", self._moved, self._reached

    def _follow(self) -> None:
        try:
            while self._queued and self._queued[0][1]():
                self._at, _ = self._queued.popleft()
                self._moved, self._reached = time.monotonic(), self._reached + 1
        except RuntimeError:  # after an error nothing on the device answers
            self._queued.clear()


def interval_s(world: int) -> float:
    """Returns the seconds between two reports of a rank without a new step or event; those are sent
    at once. Each of many ranks reports less often, as each report costs the controller the same."""
    return min(max(_INTERVAL_S, _INTERVAL_S_PER_RANK * world), _LONGEST_INTERVAL_S)


class LogTail:
    """Reads back what this process writes to one of its standard streams, from the file to which
    Ray redirects it. This includes the output of native libraries."""

    def __init__(self, descriptor: int, stream: str) -> None:
        self._stream = stream
        self._rest = b""
        self._is_long = False
        self._offset = 0
        path = Path(f"/proc/self/fd/{descriptor}")
        self._path = path.readlink() if path.is_symlink() else None
        if self._path is not None and not self._path.is_file():
            self._path = None

    def read(self, seat: Seat) -> list[LogLine]:
        """Returns the complete new lines as output of that seat; of a long one its beginning."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except OSError:
            return []
        self._offset += len(data)
        texts = (scrubbed(line.decode(errors="replace")) for line in self._lines(data))
        return [
            LogLine(text, seat.rank, seat.label, seat.attempt, self._stream)
            for text in texts
            if text and not text.startswith(_RAY_PREFIXES)
        ]

    def _lines(self, data: bytes) -> list[bytes]:
        *lines, rest = (self._rest + data).split(b"\n")
        if self._is_long and not lines:
            return []
        if self._is_long:
            del lines[0]  # the end of a line whose beginning was returned
        self._is_long = len(rest) > _LONGEST_LINE
        self._rest = b"" if self._is_long else rest
        lines += [rest] * self._is_long
        return [line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + _CUT for line in lines]


class ReportBuffer:
    """Steps, events and log lines of one rank in one seat, sent in batches. A controller that is
    killed loses what it had not written. Therefore the buffer keeps steps and events until an
    answer says that they are in the store, and sends them again to a restarted controller. It keeps
    log lines until they are sent. Thread-safe; one thread at a time sends."""

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
        with self._lock:
            self._steps.append(report)

    def add_event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def add_logs(self, lines: Iterable[LogLine]) -> None:
        with self._lock:
            self._logs.extend(lines)

    def next_batch(self, phase: str, idle_s: float) -> ReportBatch:
        """Takes all that waits as the next batch; the caller then calls `sent` or `requeue`."""
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
        """Drops what a batch's answer says is stored; after a restart, queues the rest again."""
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
        """Returns all that is not known to be in the store, in order; None if nothing."""
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
