"""Finds the run that the user named: its place, its records and its status; follows it."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypp.control.client import command_run
from raypp.control.clusters import known_runs
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.queue.client import line_exists
from raypp.control.queue.ticket import read_ticket
from raypp.errors import CheckpointError, JobError, Problem, RayppError, UnreachableError
from raypp.records import Event, RunState
from raypp.state.checkpoint.layout import spec_key, split_location
from raypp.state.checkpoint.run_spec import newest_number, read_end
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import (
    GONE_AFTER_S,
    MISSED_S,
    NO_CONTROLLER,
    STATUS_KEYS,
    RunStatus,
    date_and_clock,
    is_final,
    without_a_sign_of_life,
)
from raypp.storage import ObjectStore, StoreError, open_store

_KEYS_LOOKED_AT = 2000
_QUICK_S = 3.0
POLL_S = 0.5
_STORE_PATIENCE_S = 60.0
_ETA_STEPS = 20


def find_run(argument: str) -> tuple[RunPlace, RunReader]:
    """Returns the run of a name, or of URL/NAME; its URL has its store's form. Raises JobError:
    there is none; suggests close names. Raises StoreError: its store does not respond."""
    place = known_runs.locate_run(argument)
    store = open_store(place.url)
    reader = RunReader(store, place.name)
    if place.submitted_at is None and not reader.exists():
        raise _no_such_run(store, place.name)
    return replace(place, url=store.url), reader


def open_run(argument: str) -> tuple[ObjectStore, str, int | None]:
    """Returns store, run, step of `RUN`, `URL/NAME` or `URL/NAME/step-N`. Raises as `find_run`."""
    url, name, step = split_location(argument)
    _, reader = find_run(name if url is None else f"{url}/{name}")
    return reader.store, name, step


def open_reader(place: RunPlace) -> RunReader:
    return RunReader(open_store(place.url), place.name)


def present_status(place: RunPlace, reader: RunReader) -> dict[str, Any]:
    """Returns a run's current status. Before the first step of a resume, step, loss and speed are
    those of its history. There is an end, or its controller lives, or the run is lost: FAILED, with
    what is known. While its cluster does not answer, `error` and a further key `trouble` say so.
    Raises StoreError: its store does not respond."""
    status = _present_status(place, reader)
    rows = reader.history() if status["loss"] is None else []
    return status | {key: rows[-1][key] for key in ("step", "loss", "tokens_per_s") if rows}


def _present_status(place: RunPlace, reader: RunReader) -> dict[str, Any]:
    status = reader.status()
    if status is not None and not is_final(status) and time.time() - status["updated_at"] < MISSED_S:
        return status  # its controller lives
    try:
        ended = _ended(reader, status)
    except CheckpointError as error:
        known = status or _status_before_the_first(place, reader)
        state = known["state"] if is_final(known) else str(RunState.FAILED)
        return {**known, "state": state, "error": f"{error}\nits status says {known['state']}"}
    if ended is not None:
        return ended
    if status is None or is_final(status):  # that is an earlier submission's
        status = _status_before_the_first(place, reader) | ({} if status is None else {"step": status["step"]})
    # Only for a run without recent updates, because the check connects to the cluster.
    alive = known_runs.controller_alive(place)
    fault, gone = known_runs.cluster_fault(place) if alive is None else ("", False)
    # The run may have ended after the first look and before the check.
    if (ended := ended_status(reader)) is not None:
        return ended
    if not alive and not status["attempt"] and (waits := _waits_in_line(place, reader)):
        return {**status, "error": waits}
    silence = time.time() - float(status["updated_at"])
    if alive and silence > GONE_AFTER_S and status["attempt"] and (told := _told_by_controller(place)) is not None:
        return dict(told)
    seen = without_a_sign_of_life(status, alive, time.time(), fault if gone else "")
    if seen is status and fault and silence > MISSED_S:
        since = date_and_clock(float(status["updated_at"]))
        trouble = (
            f"the cluster's head does not answer since {since} ({fault}); the run trains on without it, or is lost"
        )
        state = status["state"] if status["state"] == RunState.PENDING else str(RunState.RECOVERING)
        return {**status, "state": state, "error": trouble, "trouble": trouble}
    if seen is not status and alive is False and (reason := _why_not_led(place)):
        return {**seen, "error": f"{reason}\nthen resume it with raypp submit --resume"}
    return seen


_told: dict[RunPlace, tuple[float, dict[str, Any] | None]] = {}


def _told_by_controller(place: RunPlace) -> dict[str, Any] | None:
    """Returns the status of a run whose records are old, because the store takes none, as its
    controller knows it; None if it does not answer. Asks it from time to time."""
    asked, told = _told.get(place, (-GONE_AFTER_S, None))
    if time.monotonic() - asked >= GONE_AFTER_S:
        with contextlib.suppress(RayppError):
            answer = command_run(known_runs.cluster_of(place, _QUICK_S), place, "facts")
            known = {key: answer[key] for key in STATUS_KEYS} if answer["found"] else None
            trouble = "the store takes no records of the run"
            if known and known["error"]:
                trouble = known["error"].partition("\n")[0]
            told = known and {**known, "updated_at": time.time(), "trouble": trouble}
        _told[place] = time.monotonic(), told
    return told


def ended_status(reader: RunReader) -> dict[str, Any] | None:
    """Returns the status of a run whose end is recorded; None of any other. Asks no cluster. Raises
    CheckpointError: that record is damaged; StoreError: its store does not respond."""
    return _ended(reader, reader.status())


def _ended(reader: RunReader, status: dict[str, Any] | None) -> dict[str, Any] | None:
    """Does what `ended_status` does, with the run's last status."""
    number = newest_number(reader.store, reader.run)
    if (end := read_end(reader.store, reader.run, number)) is not None:
        return end.in_status(status or RunStatus(reader.run, end.state).as_dict())
    if not is_final(status):
        return None
    # The run of a raypp that wrote no ends, unless this status is of the submission before.
    assert status is not None
    if number > 1 and read_end(reader.store, reader.run, number - 1) is not None:
        return None
    return status if number < 2 or status["updated_at"] >= _submitted_at(reader, number) else None


def _submitted_at(reader: RunReader, number: int) -> float:
    """Returns when a spec was written, in seconds since 1970."""
    spec = reader.store.head(spec_key(reader.run, max(1, number)))
    return spec.modified if spec else time.time()


def _waits_in_line(place: RunPlace, reader: RunReader) -> str:
    """Returns that a run waits for its turn; empty if it does not, or had it."""
    ticket = read_ticket(reader.store, reader.run, newest_number(reader.store, reader.run))
    if ticket is None:
        return ""
    with contextlib.suppress(RayppError):
        cluster = known_runs.cluster_of(place, _QUICK_S)
        if cluster.dashboard.job(ticket.submission_id) is not None:
            return ""
        if line_exists(cluster):
            return "waits in the line for devices; `raypp queue` shows its place"
        return "the cluster has lost its line; `raypp submit JOB --resume` puts the run back into its place"
    return "waited in the line for devices; the cluster does not answer"


def _why_not_led(place: RunPlace) -> str:
    """Returns why the run's controller could not be started, as its Ray job said; or ""."""
    try:
        job = known_runs.cluster_of(place, _QUICK_S).dashboard.job(place.submission_id) if place.submission_id else None
    except RayppError:
        return ""
    _, begin, reason = str((job or {}).get("message") or "").partition(NO_CONTROLLER)
    return (begin + reason).strip()


def _status_before_the_first(place: RunPlace, reader: RunReader) -> dict[str, Any]:
    """Returns the status of a run that was submitted but has not written a status yet."""
    since = place.submitted_at or _submitted_at(reader, newest_number(reader.store, reader.run))
    return RunStatus(place.name, RunState.PENDING, updated_at=since).as_dict()


def runs_below(store: ObjectStore) -> list[str]:
    """Returns the names of the runs in a store, for a hint. Looks at a limited number of keys, and
    stops at the first that may not be listed, such as another user's."""
    names: set[str] = set()
    with contextlib.suppress(StoreError):
        for info in itertools.islice(store.list(), _KEYS_LOOKED_AT):
            if "/" in info.key:
                names.add(info.key.partition("/")[0])
    return sorted(names)


def _no_such_run(store: ObjectStore, name: str) -> JobError:
    fix = known_runs.hint_of_names(name, runs_below(store), f"{store.url.rstrip('/')}/{{}}")
    fix = fix or "the store contains no runs that can be listed; use the checkpoint.url of the run's job"
    return JobError(Problem("RUN", f"there is no run {name!r} below {store.url}", fix))


# Follows a run: its records again and again, until it has ended.


@dataclass(frozen=True)
class Records:
    """A run's records as last read. `status`: as `present_status` returns it. `trouble`: why these
    are not the present ones; empty if they are."""

    status: dict[str, Any]
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Event]
    trouble: str = ""

    @classmethod
    def read(cls, place: RunPlace, reader: RunReader) -> Records:
        """Reads the status first, so that the other records contain all that it refers to. Raises
        StoreError: the store does not answer."""
        status = present_status(place, reader)
        return cls(status, reader.history(), reader.events(), status.pop("trouble", ""))

    @property
    def step(self) -> int:
        """The last finished step. The history was read after the status, so it is not behind it."""
        return int(self.rows[-1]["step"] if self.rows else self.status["step"])

    @property
    def seconds_left(self) -> float | None:
        """The time that the remaining steps take, from the last ones; None if unknown."""
        if not self.rows or not self.status["steps"]:
            return None
        per_step = statistics.median(float(row["step_s"]) for row in self.rows[-_ETA_STEPS:])
        return per_step * max(0, int(self.status["steps"]) - self.step)


def follow(
    place: RunPlace, reader: RunReader, over: Callable[[], bool] | None = None, poll_s: float = POLL_S
) -> Iterator[Records]:
    """Yields a run's records at intervals until it has ended.

    While the store does not answer, these are the last ones, with the trouble. `over`: called
    before each look. After it returns True, the records are read once more. `poll_s`: seconds
    between two looks. Raises UnreachableError: neither the store nor the cluster, which was on this
    machine, is there. Raises StoreError: the store did not answer for a minute. With `over`: did
    not when that was True.
    """
    heard, last = time.monotonic(), None
    while True:
        ends = over is not None and over()
        try:
            last, heard = Records.read(place, reader), time.monotonic()
        except StoreError as error:
            if ends or (over is None and time.monotonic() - heard > _STORE_PATIENCE_S):
                raise
            fault, gone = known_runs.cluster_fault(place)
            if gone:
                fix = "if it was the embedded cluster, `raypp local up` starts it, and --resume continues the run"
                raise UnreachableError(Problem("address", f"the run's cluster is gone: {fault}", fix)) from error
            trouble = f"cannot read the run's records at the moment: {error.problems[0].fault}"
            last = last and replace(last, trouble=trouble)
        if last is not None:
            yield last
            if not last.trouble and (ends or is_final(last.status)):
                return
        time.sleep(poll_s)
