"""Writes a run's records to its store, from one process at a time, without delaying training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raypp.errors import in_words
from raypp.kinds import store_kind
from raypp.records import Event, StepReport
from raypp.state.run_records.append_log import PartWriter
from raypp.state.run_records.json_lines import LogLine, document, event_line, log_line, step_line
from raypp.state.run_records.status import HEARTBEAT_S, RunStatus
from raypp.storage import ObjectStore

PART_BYTES = 256 * 1024
LOG_MEMORY_BYTES = 16 * 1024 * 1024
_SOON_S = 0.1
_LONGEST_BACKOFF_S = 10.0
_STATUS_S_PER_RANK = 0.002
"""The status document has a line per rank. With many ranks it is written less often, unless the
state changes."""


class RunRecorder:
    """Writes a run's steps, events, log lines and status to its store.

    All methods but `flush` and `close` return at once and never raise: a separate thread writes
    every `interval_s`, and sooner after an event or a change of state. It retries while the store
    does not answer. Meanwhile steps and events wait in memory, and so do the newest
    `log_memory_bytes` of log lines; a line reports how many were dropped. A process that is killed
    loses only what came after the last write.

    Args:
        writer: Unique in the run: `a2` for attempt 2, `c1` for a controller's first life.
        interval_s: Seconds between writes; None: 1 with a directory or a local server, else 2.
        log_memory_bytes: Largest size of unwritten log lines in memory.
        before_status: Called in each round of writes before the status, and again if it raises.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        writer: str,
        *,
        interval_s: float | None = None,
        part_bytes: int = PART_BYTES,
        log_memory_bytes: int = LOG_MEMORY_BYTES,
        before_status: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._run = run
        self._interval_s = interval_s if interval_s is not None else store_kind(store.url).record_interval_s
        self._log_memory_bytes = log_memory_bytes
        self._before_status = before_status
        self._steps = PartWriter(store, f"{run}/history", writer, part_bytes)
        self._events = PartWriter(store, f"{run}/events", writer, part_bytes)
        self._logs = PartWriter(store, f"{run}/logs", writer, part_bytes, _dropped_line)
        self._status: RunStatus | None = None
        self._status_written: RunStatus | None = None
        self._status_written_at = 0.0
        self.last_error: str | None = None
        """The error of the last write; None if it succeeded."""

        self._changed = threading.Condition()
        self._urgent = False
        self._wanted = 0
        self._tried = 0
        self.taken = 0
        """Number of steps and events recorded so far."""
        self.durable = 0
        """Number of those that are in the store, at least; they are written in the same order."""
        self._failures = 0
        self._closing = False
        self._last_round = time.monotonic()
        self._thread = threading.Thread(target=self._run_rounds, name=f"records-{run}", daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        self._steps.add(step_line(report, time.time()))
        self._count()

    def event(self, event: Event) -> None:
        """Records an event, which is written soon."""
        self._events.add(event_line(event))
        self._count()
        self.write_soon()

    def log(self, line: LogLine) -> None:
        """Records a log line; drops the oldest unwritten lines if they exceed their memory."""
        self._logs.add(log_line(line))
        self._logs.drop_oldest(self._log_memory_bytes)

    def status(self, status: RunStatus) -> None:
        """Replaces the run's current status. A change of state is written soon."""
        with self._changed:
            new_state = self._status is None or self._status.state != status.state
            self._status = status
        if new_state:
            self.write_soon()

    def flush(self, timeout_s: float | None = 30.0) -> bool:
        """Writes everything recorded so far. Returns whether it is durable. False if the store
        failed (`last_error`) or did not answer in time."""
        with self._changed:
            if not self._thread.is_alive():
                return False
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: self._tried >= wanted, timeout_s)
            return in_time and self._failures == 0

    def close(self, timeout_s: float = 30.0) -> bool:
        """Writes all, retries for `timeout_s`, ends the thread. Returns whether all is durable."""
        deadline = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        while not flushed and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
            flushed = self.flush(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.1, deadline - time.monotonic()))
        return flushed

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self) -> None:
        with self._changed:
            self.taken += 1

    def write_soon(self) -> None:
        """Lets the next round of writes begin within a tenth of a second."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def _next_round_at(self) -> float:
        if self._failures:
            wait = min(_LONGEST_BACKOFF_S, self._interval_s * 2.0 ** min(self._failures, 10))
        else:
            wait = min(_SOON_S, self._interval_s) if self._urgent else self._interval_s
        return self._last_round + wait

    def _run_rounds(self) -> None:
        while True:
            with self._changed:
                while not self._closing and self._wanted == self._tried:
                    left = self._next_round_at() - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if self._closing:
                    return
                wanted, taken = self._wanted, self.taken
                self._urgent = False
            error = self._round(everything=wanted != self._tried)
            with self._changed:
                self.last_error = error
                self.durable = self.durable if error else taken
                self._failures = self._failures + 1 if error else 0
                self._last_round = time.monotonic()
                self._tried = wanted
                self._changed.notify_all()

    def _round(self, *, everything: bool) -> str | None:
        """Writes everything, the status last, so that it never names steps that cannot be read."""
        try:
            self._steps.write()
            self._events.write()
            self._logs.write()
            self._before_status()
            self._write_status(at_once=everything)
        except Exception as error:  # noqa: BLE001  training must continue whatever the store does; it is retried
            return in_words(error)
        return None

    def _write_status(self, *, at_once: bool) -> None:
        with self._changed:
            status = self._status
        now, before = time.monotonic(), self._status_written
        if status is None:
            return
        if before is not None and before.state == status.state:
            due_s = HEARTBEAT_S if status == before else min(HEARTBEAT_S, _STATUS_S_PER_RANK * len(status.ranks))
            if now - self._status_written_at < due_s and not (at_once and status != before):
                return
        self._store.put(f"{self._run}/status.json", document(replace(status, updated_at=time.time()).as_dict()))
        self._status_written = status
        self._status_written_at = now


def _dropped_line(count: int) -> bytes:
    text = f"{count} log lines were dropped here: the store failed, or was too slow"
    return log_line(LogLine(text, label="raypp", stream="err"))
