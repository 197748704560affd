"""Gives a run's records to its trackers, each in a thread of its own, without waiting for them."""

import contextlib
import os
import queue
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from raypp.errors import RayppError, origin_in_words
from raypp.job.job import Job, TrackerOptions
from raypp.job.load import job_document
from raypp.job.secret import without_secrets
from raypp.job.trackers import environment_of
from raypp.kinds import TRACKERS, store_kind
from raypp.records import Event, EventKind, StepReport
from raypp.state.run_records.json_lines import TimedStep
from raypp.state.run_records.tracked import TrackedRun, Tracker, text_of_event, values_of, values_of_event
from raypp.storage import AlreadyExists, ObjectStore, open_store

PATIENCE_S = 120.0
"""Seconds after which a call of a library counts as hung."""
WAITING = 10_000
"""Records that may wait for a tracker; more are dropped."""
END_S = 30.0
"""Seconds that the end of a run waits for its trackers."""
_COPY_S = 30.0
_ALIKE = ("evaluated", "sampled")


class Trackers:
    """The trackers of one run; there is one such object per process, beside the run's recorder.

    `step` and `event` return at once and never raise. The threads start with the first of them.
    `report`: called with the events `tracking`, once a tracker is ready, `tracker_stopped`, if it
    fails, and `tracker_dropped`, if it is too slow; from other threads. `patience_s`, `waiting`:
    see `PATIENCE_S` and `WAITING`.
    """

    def __init__(
        self, job: Job, report: Callable[[Event], None], *, patience_s: float = PATIENCE_S, waiting: int = WAITING
    ) -> None:
        self._feeds = [_Feed(job, tracker, report, patience_s, waiting) for tracker in job.observe.trackers]
        self._job, self._started = job, False

    def step(self, report: StepReport) -> None:
        """Takes a finished step. A step that is not newer than the last one rewinds the run."""
        self._give(TimedStep(report, time.time()))

    def event(self, event: Event) -> None:
        """Takes an event: trackers get evaluations and samples."""
        self._give(event if event.kind in _ALIKE else None)

    def close(self, state: str, timeout_s: float = END_S) -> bool:
        """Ends the trackers and waits for them, but no longer than `timeout_s`. Returns whether all
        have ended. If not, a library's exit hooks may hang as well."""
        end = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end(state)
        ended = [feed.wait(end, timeout_s) for feed in self._feeds]  # each gives up its own
        return all(ended)

    def _give(self, record: TimedStep | Event | None) -> None:
        if self._feeds and not self._started:
            self._started = True  # first: what follows reports events, which come back here
            os.environ.update(environment_of(self._job))
            for feed in self._feeds:
                feed.start()
        if record is not None:
            for feed in self._feeds:
                feed.give(record)


class _Feed:
    """One tracker: a bounded queue, and the thread that gives its records to the library."""

    def __init__(
        self, job: Job, options: TrackerOptions, report: Callable[[Event], None], patience_s: float, waiting: int
    ) -> None:
        self._job, self._options, self._report, self._patience_s = job, options, report, patience_s
        self._queue: queue.Queue[TimedStep | Event | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{options.kind}", daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._state: str | None = None
        """How the run ended; None while it goes on."""
        self._dropped = 0
        self._busy_since: float | None = None
        self._copy: FolderCopy | None = None
        self._last: int | None = None
        self._reached: dict[str, int] = {}
        """The last step of each value that the tracker has."""
        self._floor = 0

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left
            self._stop(str(error))

    def give(self, record: TimedStep | Event) -> None:
        """Queues a record, or drops it if too many wait."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._patience_s:
            self._stop(f"it did not answer for {self._patience_s:g} s")
        if self._stopped:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say("tracker_dropped", f"too slow: {self._queue.maxsize:,} records wait for it; more are dropped")

    def end(self, state: str) -> None:
        self._state = state
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes the thread

    def wait(self, end: float, allowed_s: float) -> bool:
        """Waits until the thread has ended; returns whether it has."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
        if hangs := self._thread.is_alive():
            self._stop(f"it did not finish within {allowed_s:g} s of the run's end")
        if self._dropped:
            self._say("tracker_dropped", f"{self._dropped:,} records were dropped: it was too slow")
        return not hangs

    def _run(self) -> None:
        try:
            with self._busy():
                tracker = self._open()
            if not self._stopped:
                self._say("tracking", tracker.where)
            self._feed(tracker)
        except BaseException as error:  # noqa: BLE001 - a library may raise SystemExit as well
            self._stop(origin_in_words(error))

    def _feed(self, tracker: Tracker) -> None:
        copied = time.monotonic()
        while not self._stopped:
            try:
                record = self._queue.get(timeout=1.0)
            except queue.Empty:
                record = None
            if record is None and self._state is not None:
                break
            with self._busy():
                if isinstance(record, TimedStep):
                    self._step(tracker, record)
                elif record is not None:
                    self._event(tracker, record)
            if self._copy is not None and time.monotonic() - copied > _COPY_S:
                with contextlib.suppress(RayppError, OSError):  # the last one reports the error
                    self._copy.copy()
                copied = time.monotonic()
        with self._busy():
            tracker.close(self._state or "")
        if self._copy is not None:
            self._copy.finish()

    def _open(self) -> Tracker:
        kind, options, run = self._options.kind, self._options.options, self._job.name
        store = open_store(self._job.checkpoint.url)
        prefix = f"{run}/trackers/{re.sub(r'[^A-Za-z0-9.]+', '-', kind)}"
        if "dir" in options:
            folder = Path(options["dir"]) / run
            shown = str(folder)
        elif store_kind(store.url).local:
            folder = Path(store.url.removeprefix("file://")) / prefix
            shown = str(folder)
        else:
            folder = Path(tempfile.mkdtemp(prefix="raypp-tracker-"))
            shown = f"{store.url.rstrip('/')}/{prefix}"
            self._copy = FolderCopy(folder, store, prefix)
        folder.mkdir(parents=True, exist_ok=True)
        url, config = f"{store.url.rstrip('/')}/{run}", without_secrets(job_document(self._job))
        tracked = TrackedRun(run, url, identity(store, run), folder, shown, options, config)
        tracker: Tracker = TRACKERS.get(kind).build()(tracked)
        self._floor = tracker.newest
        return tracker

    def _step(self, tracker: Tracker, timed: TimedStep) -> None:
        step = timed.report.step
        if (self._last is None or step <= self._last) and tracker.rewind(step):
            self._reached.clear()
            self._floor = 0
        self._last = step
        self._values(tracker, step, timed.time, values_of(timed.report))

    def _event(self, tracker: Tracker, event: Event) -> None:
        step = event.step if event.step is not None else self._last or 0
        self._values(tracker, step, event.time, values_of_event(event))
        if (text := text_of_event(event)) and self._is_new("samples", step):
            tracker.text(step, event.time, "samples", text)

    def _values(self, tracker: Tracker, step: int, when: float, values: dict[str, float]) -> None:
        new = {name: value for name, value in values.items() if self._is_new(name, step)}
        if new:
            tracker.values(step, when, new)

    def _is_new(self, name: str, step: int) -> bool:
        if step <= self._reached.get(name, self._floor):
            return False
        self._reached[name] = step
        return True

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        yield
        self._busy_since = None

    def _stop(self, why: str) -> None:
        """Gives the tracker up, and reports that once. A call that hangs keeps its thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._say("tracker_stopped", f"{why}: stopped; the run continues")

    def _say(self, kind: EventKind, message: str) -> None:
        self._report(Event(kind, f"tracker {self._options.kind}: {message}"))


class FolderCopy:
    """Copies the files of a local folder to a store, while they grow."""

    def __init__(self, folder: Path, store: ObjectStore, prefix: str) -> None:
        self._folder, self._store, self._prefix = folder, store, prefix
        self._copied: dict[str, tuple[int, int]] = {}

    def finish(self) -> None:
        """Copies what is new, removes the folder, which stays if the store fails (StoreError)."""
        self.copy()
        shutil.rmtree(self._folder, ignore_errors=True)

    def copy(self) -> None:
        for path in sorted(self._folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):  # the library has removed it meanwhile
                facts, name = path.stat(), path.relative_to(self._folder).as_posix()
                seen = (facts.st_size, facts.st_mtime_ns)
                if self._copied.get(name) != seen:
                    self._store.put(f"{self._prefix}/{name}", path.read_bytes())
                    self._copied[name] = seen


def identity(store: ObjectStore, run: str) -> str:
    """Returns a run's id for trackers: the same in all its lives, another if it is started anew."""
    key = f"{run}/trackers/id"
    with contextlib.suppress(AlreadyExists):
        store.put(key, f"{run[:40]}-{secrets.token_hex(4)}".encode(), if_absent=True)
    stored = store.get(key, 0, 100).decode("ascii", "replace")
    return stored if re.fullmatch(r"[a-z0-9-]{1,60}", stored) else f"{run}-damaged"
