"""The reporter of a rank under Ray: collects, and a thread hands it to the controller a few times a second."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from raypp.control.credentials import scrubbed
from raypp.control.process_evidence import inside
from raypp.control.protocol import Answer, Batch
from raypp.control.report.outbox import Outbox
from raypp.control.report.relay import way_of
from raypp.observe.json_lines import LogLine
from raypp.records import Event, Requests, Seat, StepReport

_INTERVAL_S = 0.25
_INTERVAL_S_PER_RANK = 0.004  # 250 reports a second, of all ranks together
_LONGEST_INTERVAL_S = 4.0  # a rank that tells nothing for 5 s beyond its limit counts as silent
_AWAY_S = 1.0
_ANSWER_S = 30.0
_STANDS_S = 2.0
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")


class ControllerReporter:
    """A `Reporter` that speaks to the run's controller.

    Each hand-over carries what is new and brings back what the operator wants, so the controller never has
    to call into a worker that computes.

    Args:
        controller: Handle of the controller actor.
        tails: This process' output, read from where the last seat's reporter stopped.
        relay: Handle of the relay that hands on what this rank tells; None in a run without.
    """

    def __init__(self, controller: Any, seat: Seat, tails: tuple[LogTail, ...], relay: Any = None) -> None:
        self._way = way_of(controller, relay, seat.rank, interval_s(seat.world_size), _ANSWER_S)
        self._seat = seat
        self._tails = tails
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._phase = "starting"
        self._moved = time.monotonic()
        self._outbox = Outbox(seat)
        self._stop: Requests | None = None
        self._save_once = False
        self.last_step = 0
        """The step this rank is at, as far as it said."""
        self.answered = time.monotonic()
        """When the controller last answered."""
        self._rank_thread: int | None = None
        self._thread = threading.Thread(target=self._push, name="reporter", daemon=True)

    # The Reporter protocol ------------------------------------------------------------------------

    def phase(self, name: str, detail: str = "") -> None:
        first = detail.partition(" ")[0]
        if name == "step" and first.isdigit():
            self.last_step = int(first)
        self._phase = f"{name} {detail}".strip()
        self._moved = time.monotonic()

    def step(self, report: StepReport) -> None:
        self._outbox.add_step(report)
        self._wake.set()

    def event(self, event: Event) -> None:
        self._outbox.add_event(event)
        self._wake.set()

    def requests(self) -> Requests:
        # A save is handed on once: the ranks take the maximum over all of them, and act once.
        with self._lock:
            save, self._save_once = self._save_once, False
            stop = self._stop
        if stop is None:
            return Requests(save=save)
        return Requests(save=save, stop=True, save_before_stop=stop.save_before_stop)

    # Its own life ---------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Wants a last save and the end, as an operator would: for a process that nobody leads any more."""
        with self._lock:
            self._stop = Requests(stop=True, save_before_stop=True)

    def left_over(self) -> Batch | None:
        """What no controller is known to have written; after the end."""
        return self._outbox.left_over()

    def __enter__(self) -> ControllerReporter:
        self._rank_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hands over the rest, log lines included; what cannot be is `left_over`."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=_ANSWER_S)

    def _push(self) -> None:
        away = False
        while True:
            last = self._closing
            self._wake.clear()
            batch = self._batch()
            try:
                answer = self._way.hand_over(batch)
            except Exception as error:  # noqa: BLE001  a controller that is away must not disturb training
                self._outbox.returned(batch)
                if not away:
                    print(f"the controller does not answer: {type(error).__name__}", file=sys.stderr)  # noqa: T201
                away = True
                if last:
                    return
                self._wake.wait(_AWAY_S)
                continue
            away = False
            self._outbox.delivered(batch, answer)
            self._take(answer)
            if last:
                return
            self._wake.wait(self._way.pace_s)

    def _batch(self) -> Batch:
        """What is new, behind what could not be delivered the last time."""
        for tail in self._tails:
            self._outbox.add_logs(tail.read(self._seat))
        idle_s = time.monotonic() - self._moved
        batch = self._outbox.take(self._phase, idle_s)
        if idle_s < _STANDS_S:
            return batch
        return dataclasses.replace(batch, inside=inside(self._rank_thread))

    def _take(self, answer: Answer) -> None:
        self.answered, requests = time.monotonic() - answer.ago_s, answer.requests
        with self._lock:
            self._save_once = self._save_once or requests.save
            if requests.stop:
                self._stop = requests


def interval_s(world: int) -> float:
    """Seconds between two reports of a rank that has no step and no event to tell; those are told at once.

    A report costs the controller the same whatever is in it, so each of many ranks reports less often.
    """
    return min(max(_INTERVAL_S, _INTERVAL_S_PER_RANK * world), _LONGEST_INTERVAL_S)


class LogTail:
    """What this process writes to one of its standard streams, read back from the file Ray redirected it to.

    So lines of native libraries are seen too.
    """

    def __init__(self, descriptor: int, stream: str) -> None:
        self._stream = stream
        self._rest = b""
        self._offset = 0
        path = Path(f"/proc/self/fd/{descriptor}")
        self._path = path.readlink() if path.is_symlink() else None
        if self._path is not None and not self._path.is_file():
            self._path = None

    def read(self, seat: Seat) -> list[LogLine]:
        """The whole lines that are new, as the output of that seat."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts = (scrubbed(line.decode(errors="replace")) for line in lines)
        return [
            LogLine(text, seat.rank, seat.label, seat.attempt, self._stream)
            for text in texts
            if text and not text.startswith(_RAY_MARKS)
        ]
