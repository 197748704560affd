"""Finds the run that the user named: its place, its records and its status."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace
from typing import Any

from raypp.clusters import known_runs
from raypp.clusters.known_runs import RunPlace
from raypp.errors import JobError, Problem, RayppError
from raypp.observe.reader import RunReader
from raypp.observe.status import GONE_AFTER_S, NO_CONTROLLER, RunStatus, is_final, without_a_sign_of_life
from raypp.records import RunState
from raypp.storage import ObjectStore, StoreError, open_store

_KEYS_LOOKED_AT = 2000
_QUICK_S = 3.0


def find_run(argument: str) -> tuple[RunPlace, RunReader]:
    """Returns the run of a name, or of URL/NAME. The URL gets the form that its store gives it.

    Raises:
        JobError: There is no such run. The message suggests close names.
        StoreError: Its store does not respond.
    """
    place = known_runs.locate_run(argument)
    store = open_store(place.url)
    reader = RunReader(store, place.name)
    if place.submitted_at is None and not reader.exists():
        raise _no_such_run(store, place.name)
    return replace(place, url=store.url), reader


def open_reader(place: RunPlace) -> RunReader:
    """Opens the records of a known run."""
    return RunReader(open_store(place.url), place.name)


def present_status(place: RunPlace, reader: RunReader) -> dict[str, Any]:
    """Returns a run's current status.

    This is `recorded_status`, but PENDING if the run was resubmitted and has no new status yet.

    Raises:
        StoreError: Its store does not respond.
    """
    status = recorded_status(place, reader)
    submitted_again = place.submitted_at is not None and place.submitted_at > status["updated_at"]
    if is_final(status) and submitted_again and known_runs.controller_alive(place):
        return {**status, "state": str(RunState.PENDING), "ranks": [], "error": None}
    return status


def recorded_status(place: RunPlace, reader: RunReader) -> dict[str, Any]:
    """Returns the status from the run's records, or FAILED if its controller is gone.

    Raises:
        StoreError: Its store does not respond.
    """
    status = reader.status() or _status_before_the_first(place)
    if is_final(status) or time.time() - status["updated_at"] < GONE_AFTER_S:
        return status
    # Only for a run without recent updates, because the check connects to the cluster.
    alive = known_runs.controller_alive(place)
    # The run may have recorded its end after the first read and before the check.
    status = reader.status() or status
    seen = without_a_sign_of_life(status, alive, time.time())
    if seen is not status and alive is False and (reason := _why_not_led(place)):
        return {**seen, "error": f"{reason}\nthen resume it with raypp submit --resume"}
    return seen


def _why_not_led(place: RunPlace) -> str:
    """Returns why the run's controller could not be started, as its Ray job said; empty if it
    could, or if nobody knows."""
    try:
        job = known_runs.cluster_of(place, _QUICK_S).dashboard.job(place.submission_id) if place.submission_id else None
    except RayppError:
        return ""
    _, begin, reason = str((job or {}).get("message") or "").partition(NO_CONTROLLER)
    return (begin + reason).strip()


def _status_before_the_first(place: RunPlace) -> dict[str, Any]:
    """Returns the status of a run that was submitted but has not written a status yet."""
    since = place.submitted_at
    if since is None:
        spec = open_store(place.url).head(f"{place.name}/spec.json")
        since = spec.modified if spec else time.time()
    return RunStatus(place.name, RunState.PENDING, updated_at=since).as_dict()


def runs_below(store: ObjectStore) -> list[str]:
    """Returns the names of the runs in a store, for a hint.

    Looks at a limited number of keys, and stops at the first that may not be listed, such as
    another user's.
    """
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
