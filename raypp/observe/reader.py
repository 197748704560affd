"""The reading end of a run's records: anywhere that reaches the store, during the run or years after it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raypp.errors import Problem, RayppError
from raypp.observe.append_log import Cursor, Line, new_lines
from raypp.observe.json_lines import LogLine, TimedStep, read_document, read_event, read_log, read_step
from raypp.records import Event, StepReport
from raypp.storage import NotFound, ObjectStore

_Record = TypeVar("_Record")


class RunReader:
    """Reads what a `RunRecorder` wrote. Asked again, it fetches only what is new. Not for several threads at once.

    Args:
        store: Opened at the URL the run lives below.
        run: The run's name.

    Every method raises `StoreError` when the store does not answer.
    """

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self._run = run
        self._step_cursor = Cursor()
        self._event_cursor = Cursor()
        self._steps: list[TimedStep] = []
        self._kept: list[TimedStep] = []
        self._events: list[Event] = []
        self.damaged = 0
        """Whole lines so far that could not be understood; they are left out."""

    @property
    def run(self) -> str:
        return self._run

    def exists(self) -> bool:
        """Whether the store holds anything below the run's name."""
        return next(iter(self._store.list(f"{self._run}/")), None) is not None

    def status(self) -> dict[str, Any] | None:
        """The last status written (`RunStatus.as_dict`); None before the first.

        Raises:
            RayppError: `status.json` is there and is not a status.
        """
        try:
            data = self._store.get(f"{self._run}/status.json")
        except NotFound:
            return None
        try:
            return read_document(data)
        except ValueError as error:
            place = f"{self._store.url}/{self._run}/status.json"
            raise RayppError(Problem(place, f"is not a status: {error}", "did something else write it?")) from error

    def history(self) -> list[dict[str, Any]]:
        """The lines of `raypp history`, oldest first: see `steps` for which."""
        return [step.row() for step in self.steps()]

    def reports(self) -> list[StepReport]:
        """The whole reports of the steps of `history`."""
        return [step.report for step in self.steps()]

    def steps(self) -> list[TimedStep]:
        """The steps that led to where the run is now, oldest first, each once.

        A restart goes back to a checkpoint: from the first step of a later attempt on, what earlier
        attempts did counts no more. Within an attempt the last report of a step counts.
        """
        found = self._poll("history", self._step_cursor, read_step)
        if found:
            self._steps.extend(found)
            self._kept = _last_lives(self._steps)
        return list(self._kept)

    def events(self) -> list[Event]:
        """All events, oldest first."""
        found = self._poll("events", self._event_cursor, read_event)
        if found:
            self._events = sorted([*self._events, *found], key=lambda event: event.time)
        return list(self._events)

    def evaluations(self) -> list[dict[str, Any]]:
        """What the evaluations found, by step: step, loss, tokens, seconds, attempt.

        One that was repeated after a restart counts once, with the last attempt's values.
        """
        found: dict[int, dict[str, Any]] = {}
        for event in self.events():
            if event.kind == "evaluated" and event.step is not None:
                values = {key: event.details.get(key) for key in ("loss", "tokens", "seconds")}
                found[event.step] = {"step": event.step, **values, "attempt": event.attempt}
        return [found[step] for step in sorted(found)]

    def logs(self, rank: int | None = None, since: Cursor | None = None) -> Iterator[LogLine]:
        """Log lines, oldest first, read as they are consumed.

        Args:
            rank: Only this rank's.
            since: Where to go on; it moves on with the lines given out. The same cursor again gives what is new.
        """
        cursor = since if since is not None else Cursor()
        writers = new_lines(self._store, f"{self._run}/logs", cursor)
        streams = [self._read_each(lines, read_log) for lines in writers.values()]
        for record, line in heapq.merge(*streams, key=lambda pair: pair[0].time):
            cursor.pass_by(line)
            if rank is None or record.rank == rank:
                yield record

    def _poll(self, folder: str, cursor: Cursor, read: Callable[[bytes], _Record]) -> list[_Record]:
        writers = new_lines(self._store, f"{self._run}/{folder}", cursor)
        # Whole before the cursor moves: when the store fails halfway, the next poll gets all of it.
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


def _last_lives(steps: list[TimedStep]) -> list[TimedStep]:
    """The last life of each step; steps of earlier attempts that a later one left behind are void."""
    kept: dict[int, TimedStep] = {}
    attempt = None
    for timed in sorted(steps, key=lambda timed: (timed.report.attempt, timed.time)):
        if timed.report.attempt != attempt:
            attempt = timed.report.attempt
            kept = {step: other for step, other in kept.items() if step < timed.report.step}
        kept[timed.report.step] = timed
    return [kept[step] for step in sorted(kept)]
