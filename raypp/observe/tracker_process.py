"""The process of one tracker: takes a run's records on its standard input, gives them to the
library.

The library can be slow, hang, crash or print what it likes: training does not notice.

It is a process because a call that hangs cannot be interrupted in a thread, and because a library's
exit hooks may wait for its server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from raypp.errors import RayppError, origin_in_words
from raypp.kinds import TRACKERS, store_kind
from raypp.observe.json_lines import read_event, read_step
from raypp.observe.tracked import TrackedRun, Tracker, text_of_event, values_of, values_of_event
from raypp.storage import AlreadyExists, ObjectStore, open_store

SETUP, STEP, EVENT, END = b"0", b"s", b"e", b"."
"""The first byte of each line says what it is."""
_COPY_S = 30.0


class TrackerProcess:
    """Feeds one tracker.

    Args:
        setup: kind, options, run, url (of the store), job, and patience_s, after which a call that
            has not returned is given up.
        answer: Called with each answer to the run: {"where": …} or {"error": …}.
    """

    def __init__(self, setup: dict[str, Any], answer: Any) -> None:
        self._setup, self._answer = setup, answer
        self._last: int | None = None
        self._reached: dict[str, int] = {}
        """The last step of each value that the tracker has."""
        self._floor = 0
        self._busy_since: float | None = None
        self._copy: FolderCopy | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, records: BinaryIO) -> None:
        """Handles records until the input ends."""
        with self._patience():
            tracker = self._open()
            self._answer({"where": tracker.where})
        state = ""
        for line in records:
            kind, content = line[:1], line[1:]
            with self._patience():
                if kind == STEP:
                    self._step(tracker, content)
                elif kind == EVENT:
                    self._event(tracker, content)
                elif kind == END:
                    state = content.decode().strip()
        with self._patience():
            tracker.close(state)
            if self._copy is not None:
                self._copy.finish()

    def _open(self) -> Tracker:
        setup = self._setup
        kind, run = TRACKERS.get(setup["kind"]), setup["run"]
        store = open_store(setup["url"])
        name = re.sub(r"[^A-Za-z0-9.]+", "-", setup["kind"])
        prefix = f"{run}/trackers/{name}"
        if "dir" in setup["options"]:
            folder = Path(setup["options"]["dir"]) / run
            shown = str(folder)
        elif store_kind(store.url).local:
            folder = Path(store.url.removeprefix("file://")) / prefix
            shown = str(folder)
        else:
            folder = Path(tempfile.mkdtemp(prefix="raypp-tracker-"))
            shown = f"{store.url.rstrip('/')}/{prefix}"
            self._copy = FolderCopy(folder, store, prefix)
        folder.mkdir(parents=True, exist_ok=True)
        tracked = TrackedRun(
            run, f"{store.url.rstrip('/')}/{run}", identity(store, run), folder, shown, setup["options"], setup["job"]
        )
        tracker: Tracker = kind.build()(tracked)
        self._floor = tracker.newest
        return tracker

    def _step(self, tracker: Tracker, line: bytes) -> None:
        timed = read_step(line)
        step = timed.report.step
        if (self._last is None or step <= self._last) and tracker.rewind(step):
            self._reached.clear()
            self._floor = 0
        self._last = step
        self._values(tracker, step, timed.time, values_of(timed.report))

    def _event(self, tracker: Tracker, line: bytes) -> None:
        event = read_event(line)
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
    def _patience(self) -> Any:
        self._busy_since = time.monotonic()
        yield
        self._busy_since = None

    def _watch(self) -> None:
        """Ends the process when a call of the library does not return: nothing can interrupt it."""
        patience_s = float(self._setup["patience_s"])
        while True:
            time.sleep(min(1.0, patience_s / 4))
            since = self._busy_since
            if since is not None and time.monotonic() - since > patience_s:
                self._answer({"error": f"it did not answer for {patience_s:g} s"})
                os._exit(1)


class FolderCopy:
    """Copies the files of a local folder to a store, while they grow, in a thread of its own."""

    def __init__(self, folder: Path, store: ObjectStore, prefix: str) -> None:
        self._folder, self._store, self._prefix = folder, store, prefix
        self._copied: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._repeat, daemon=True).start()

    def finish(self) -> None:
        """Copies what is new and removes the folder.

        Raises:
            StoreError: The store does not answer; the folder stays.
        """
        self._round()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _repeat(self) -> None:
        while True:
            time.sleep(_COPY_S)
            with contextlib.suppress(RayppError, OSError):  # the next round tries again; the last one reports the error
                self._round()

    def _round(self) -> None:
        with self._lock:
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
    """Returns the id of a run for trackers: the same in every life of it, but different if a run of
    that name was deleted and started again."""
    key = f"{run}/trackers/id"
    with contextlib.suppress(AlreadyExists):
        store.put(key, f"{run[:40]}-{secrets.token_hex(4)}".encode(), if_absent=True)
    stored = store.get(key, 0, 100).decode("ascii", "replace")
    return stored if re.fullmatch(r"[a-z0-9-]{1,60}", stored) else f"{run}-damaged"


def main() -> int:
    """Runs the process: its answers are JSON lines on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not be taken for an answer

    def answer(value: dict[str, str]) -> None:
        with contextlib.suppress(OSError):  # the run's process was killed
            answers.write(json.dumps(value) + "\n")
            answers.flush()

    try:
        setup = json.loads(sys.stdin.buffer.readline()[1:])
        TrackerProcess(setup, answer).run(sys.stdin.buffer)
    except BaseException as error:  # noqa: BLE001  a library may raise SystemExit
        answer({"error": origin_in_words(error)})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a library's exit hooks may wait for its server
