"""Gives a run's records to its trackers, each a process of its own, without waiting for them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from raypp.observe import tracker_process
from raypp.observe.json_lines import event_line, step_line
from raypp.observe.tracker_process import END, EVENT, SETUP, STEP
from raypp.records import Event, StepReport
from raypp.spec.job import Job, TrackerOptions
from raypp.spec.load import job_document
from raypp.spec.secret import without_secrets
from raypp.spec.trackers import environment_of

PATIENCE_S = 120.0
"""Seconds after which a call of a library counts as hung."""
WAITING = 10_000
"""Records that may wait for a tracker; more than these stop it."""
END_S = 30.0
"""Seconds that the end of a run waits for its trackers."""
_ALIKE = ("evaluated", "sampled")


class Trackers:
    """The trackers of one run; there is one such object per run, beside its recorder.

    `step` and `event` return at once and never raise. The processes start with the first of them.

    Args:
        job: The run's job.
        tell: Called with the events `tracking`, once a tracker is ready, and `tracker_stopped`, if
            it fails; from other threads.
        patience_s, waiting: See `PATIENCE_S` and `WAITING`.
    """

    def __init__(
        self, job: Job, tell: Callable[[Event], None], *, patience_s: float = PATIENCE_S, waiting: int = WAITING
    ) -> None:
        self._job, self._tell = job, tell
        self._patience_s, self._waiting = patience_s, waiting
        self._feeds: list[_Feed] | None = None
        self._lock = threading.RLock()

    def step(self, report: StepReport) -> None:
        """Takes a finished step. A step that is not newer than the last one rewinds the run."""
        if self._job.observe.trackers:
            self._give(STEP + step_line(report, time.time()))

    def event(self, event: Event) -> None:
        """Takes an event: trackers get evaluations and samples."""
        if self._job.observe.trackers:
            self._give(EVENT + event_line(event) if event.kind in _ALIKE else b"")

    def close(self, state: str, timeout_s: float = END_S) -> None:
        """Ends the trackers' processes and waits for them; kills those that take longer.

        Args:
            state: How the run ended.
        """
        feeds, end = self._feeds or [], time.monotonic() + timeout_s
        for feed in feeds:
            feed.give(END + state.encode() + b"\n")
            feed.give(None)
        for feed in feeds:
            feed.wait(max(0.0, end - time.monotonic()), timeout_s)

    def _give(self, line: bytes) -> None:
        with self._lock:
            if self._feeds is None:
                self._feeds = []  # first: what follows reports events, which come back here
                self._feeds = [self._feed(tracker) for tracker in self._job.observe.trackers]
            feeds = self._feeds
        if line:
            for feed in feeds:
                feed.give(line)

    def _feed(self, tracker: TrackerOptions) -> _Feed:
        setup = {
            "kind": tracker.kind,
            "options": tracker.options,
            "run": self._job.name,
            "url": self._job.checkpoint.url,
            "job": without_secrets(job_document(self._job)),
            "patience_s": self._patience_s,
        }
        return _Feed(tracker.kind, setup, environment_of(self._job), self._tell, self._waiting)


class _Feed:
    """One tracker: a bounded queue, a thread that writes to its process, one that hears it."""

    def __init__(
        self, kind: str, setup: dict[str, Any], environment: dict[str, str], tell: Callable[[Event], None], waiting: int
    ) -> None:
        self._kind, self._tell = kind, tell
        self._lock = threading.Lock()
        self._over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: queue.Queue[bytes | None] = queue.Queue(waiting)
        self.give(SETUP + json.dumps(setup).encode() + b"\n")
        self._thread = threading.Thread(
            target=self._feed, args=({**os.environ, **environment},), name=f"tracker-{kind}", daemon=True
        )
        self._thread.start()

    def give(self, line: bytes | None) -> None:
        """Queues a record; None ends the process after those before it."""
        if self._over:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._stop(f"it is too slow: {self._queue.maxsize:,} records wait for it")

    def wait(self, seconds: float, allowed_s: float) -> None:
        """Waits until the process has ended; kills it if it takes longer."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._stop(f"it did not finish within {allowed_s:g} s of the run's end")

    def _feed(self, environment: dict[str, str]) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", tracker_process.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a Ctrl-C or SIGTERM is for the run, which ends its trackers in order
            )
        except OSError as error:
            self._stop(f"its process did not start: {error}")
            return
        with self._lock:
            self._process = process
            killed = self._over
        if killed:
            _kill(process)
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        listener.start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; the other thread knows why
            while (line := self._queue.get()) is not None and not self._over:
                process.stdin.write(line)
                if self._queue.empty():
                    process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()
        listener.join()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        error = ""
        for line in process.stdout:
            answer = json.loads(line)
            error = answer.get("error", error)
            if "where" in answer and not self._over:
                self._tell(Event("tracking", f"tracker {self._kind}: {answer['where']}"))
        code = process.wait()
        if code:
            self._stop(error or f"its process ended with exit code {code}")

    def _stop(self, why: str) -> None:
        """Gives the tracker up, and reports that once."""
        with self._lock:
            if self._over:
                return
            self._over = True
            process = self._process
        if process is not None:
            _kill(process)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._tell(Event("tracker_stopped", f"tracker {self._kind}: {why}: stopped; the run continues"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a tracker's process and those that its library started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
