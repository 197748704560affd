"""Reads a run's records from the store, from any machine, during the run or later."""

import heapq
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

from raypp.errors import RayppError
from raypp.records import Event, StepReport
from raypp.state.run_records.append_log import Cursor, Line, new_lines
from raypp.state.run_records.json_lines import LogLine, TimedStep, read_event, read_log, read_step
from raypp.state.run_records.status import RunStatus
from raypp.storage import NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, parse_as

_BOUNDS = Bounds()
_Record = TypeVar("_Record")


class RunReader:
    """Reads what a `RunRecorder` wrote; repeated calls fetch only what is new. Not thread-safe.
    Every method raises `StoreError` if the store does not answer."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self.store = store
        self.run = run
        self._step_cursor = Cursor()
        self._event_cursor = Cursor()
        self._steps: list[TimedStep] = []
        self._kept: list[TimedStep] = []
        self._rows: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self.damaged = 0
        """Number of complete lines that could not be decoded; they are skipped."""

    def exists(self) -> bool:
        """Returns whether the store holds anything under the run's name."""
        return next(iter(self.store.list(f"{self.run}/")), None) is not None

    def status(self) -> dict[str, Any] | None:
        """Returns the last status written (`RunStatus.as_dict`); None before the first. Raises
        RayppError: `status.json` exists but is not a status."""
        status = self.run_status()
        return None if status is None else status.as_dict()

    def run_status(self) -> RunStatus | None:
        """Returns the last status written as a record; see `status`."""
        key = f"{self.run}/status.json"
        try:
            data = self.store.get(key, 0, _BOUNDS.size + 1)
        except NotFound:
            return None
        fix = "check whether another program wrote it"
        # A newer raypp may write more keys.
        return parse_as(
            RunStatus, data, f"{self.store.url}/{key}", _BOUNDS, RayppError, fix, kind="a status", unknown="ignore"
        )

    def history(self) -> list[dict[str, Any]]:
        """Returns the lines of `raypp history`, oldest first; see `steps` for which."""
        steps = self.steps()
        self._rows += [step.row() for step in steps[len(self._rows) :]]
        return list(self._rows)

    def reports(self) -> list[StepReport]:
        """Returns the complete reports of the steps of `history`."""
        return [step.report for step in self.steps()]

    def steps(self) -> list[TimedStep]:
        """Returns the steps that led to the run's current state, oldest first, each once. A restart
        resumes from a checkpoint: the first step of a later attempt voids that step and all later
        ones of earlier attempts. Within an attempt, the last report of a step counts."""
        new = self._poll("history", self._step_cursor, read_step)
        if new:
            self._steps.extend(new)
            pairs = [(old.report, new.report, old.time <= new.time) for old, new in pairwise([*self._kept[-1:], *new])]
            if self._kept and all(a.attempt == b.attempt and a.step < b.step and later for a, b, later in pairs):
                self._kept.extend(new)
            else:
                self._kept, self._rows = _last_reports(self._steps), []
        return list(self._kept)

    def events(self) -> list[Event]:
        new = self._poll("events", self._event_cursor, read_event)
        if new:
            self._events = sorted([*self._events, *new], key=lambda event: event.time)
        return list(self._events)

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the results of evaluations by step: step, loss, tokens, seconds, attempt."""
        results = []
        for step, event in self._last_of("evaluated"):
            values = {key: event.details.get(key) for key in ("loss", "tokens", "seconds")}
            results.append({"step": step, **values, "attempt": event.attempt})
        return results

    def eval_losses(self) -> dict[int, float]:
        """Returns the loss on the held-out part by step."""
        return {one["step"]: float(loss) for one in self.evaluations() if isinstance(loss := one["loss"], int | float)}

    def samples(self) -> list[dict[str, Any]]:
        """Returns the samples by step: step, attempt, samples (prompt, text, tokens, finish)."""
        return [
            {"step": step, "attempt": event.attempt, "samples": [one for one in listed if isinstance(one, dict)]}
            for step, event in self._last_of("sampled")
            if isinstance(listed := event.details.get("samples"), list)
        ]

    def _last_of(self, kind: str) -> list[tuple[int, Event]]:
        """Returns the events of a kind by step; of those that restarts repeated, the last one."""
        last = {event.step: event for event in self.events() if event.kind == kind and event.step is not None}
        return sorted(last.items())

    def logs(self, rank: int | None = None, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yields log lines, oldest first, and reads them as they are consumed. `since`: where to
        continue. It advances with the yielded lines: pass it again for new lines."""
        cursor = since if since is not None else Cursor()
        writers = new_lines(self.store, f"{self.run}/logs", cursor)
        streams = [self._read_each(lines, read_log) for lines in writers.values()]
        for record, line in heapq.merge(*streams, key=lambda pair: pair[0].time):
            cursor.pass_by(line)
            if rank is None or record.rank == rank:
                yield record

    def _poll(self, folder: str, cursor: Cursor, read: Callable[[bytes], _Record]) -> list[_Record]:
        writers = new_lines(self.store, f"{self.run}/{folder}", cursor)
        # Read everything before the cursor moves: if the store fails, the next poll repeats it.
        pairs = [pair for lines in writers.values() for pair in self._read_each(lines, read)]
        for _, line in pairs:
            cursor.pass_by(line)
        return [record for record, _ in pairs]

    def _read_each(self, lines: Iterator[Line], read: Callable[[bytes], _Record]) -> Iterator[tuple[_Record, Line]]:
        for line in lines:
            try:
                record = read(line.data)
            except ValueError:
                self.damaged += 1
                continue
            yield record, line


def _last_reports(steps: list[TimedStep]) -> list[TimedStep]:
    """Returns each step's last report, without the steps that a later attempt voided."""
    kept: dict[int, TimedStep] = {}
    attempt = None
    for timed in sorted(steps, key=lambda timed: (timed.report.attempt, timed.time)):
        if timed.report.attempt != attempt:
            attempt = timed.report.attempt
            kept = {step: other for step, other in kept.items() if step < timed.report.step}
        kept[timed.report.step] = timed
    return [kept[step] for step in sorted(kept)]
