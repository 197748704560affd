"""Runs known to this user: submitted from this machine, or remembered by the reachable cluster."""

import contextlib
import difflib
import errno
import glob
import hashlib
import json
import os
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from raypp.control.clusters import local
from raypp.control.clusters.dashboard import FINAL_JOB_STATES, Dashboard
from raypp.control.clusters.find import Cluster, find_cluster, lend_settings_of, lend_store_settings
from raypp.errors import JobError, Problem, RayppError
from raypp.proxies import is_loopback
from raypp.untrusted.documents import parse_as
from raypp.untrusted.files import read_file, same_place
from raypp.untrusted.text import shell_word
from raypp.user_folder import raypp_home, write_private

_QUICK_S = 3.0
_MAX_NAMES = 8
_MOST_BYTES = 64 << 10
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class RunPlace:
    """Where a run is stored, and where it runs. `url`: of the store, without the run's name.
    `submission_id`: of its Ray job; empty if unknown. `submitted_at`: seconds since 1970; None if
    unknown."""

    url: str
    name: str
    address: str | None
    submission_id: str = ""
    submitted_at: float | None = None


def cluster_name(url: str, name: str) -> str:
    """Returns what a cluster calls a run, by which it tells runs of one name in two stores apart:
    the name, and a digest of both. `url`: of its store, in the store's own form."""
    store = (url if "://" in url else os.path.realpath(url)).rstrip("/")
    return f"{name}.{hashlib.sha256(f'{store}/{name}'.encode()).hexdigest()[:8]}"


def remember_run(place: RunPlace) -> None:
    write_private(_file(place.url, place.name), json.dumps(asdict(place)))


def locate_run(argument: str) -> RunPlace:
    """Returns the run with this name or URL/NAME. Raises JobError: no such run is known here."""
    lend_store_settings()
    place = _located(argument)
    lend_settings_of(place.address)
    return place


def _located(argument: str) -> RunPlace:
    argument = argument.rstrip("/")
    if "/" in argument:
        url, _, name = argument.rpartition("/")
        known = next((one for one in known_runs() if (one.url.rstrip("/"), one.name) == (url, name)), None)
        return known or RunPlace(url, name, None)
    remembered = map(_read, (raypp_home() / "runs").glob(f"{glob.escape(argument)}.*"))
    named = [one for one in remembered if one is not None and one.name == argument]
    if not named:
        places = known_runs()
        named = [one for one in places if one.name == argument]
        if not named:
            raise _unknown(argument, [one.name for one in places])
    named.sort(key=lambda place: place.submitted_at or 0.0, reverse=True)
    # The newest, unless several of them are active.
    active = [one for one in named if one.address is not None and controller_alive(one)] if len(named) > 1 else []
    if len(active) > 1:
        forms = [shell_word(f"{one.url.rstrip('/')}/{one.name}") for one in active]
        raise JobError(Problem("RUN", f"{len(active)} runs named {argument!r} are active", f"use {' or '.join(forms)}"))
    return (active or named)[0]


def known_runs(*, mine: bool = False) -> list[RunPlace]:
    """Returns, newest first, runs submitted here and, unless `mine`, of the reachable cluster."""
    lend_store_settings()
    places = {}
    with contextlib.suppress(RayppError):
        for place in () if mine else _of_cluster(find_cluster(timeout_s=_QUICK_S)):
            places[place.url, place.name] = place
    for path in islice((raypp_home() / "runs").glob("*.json"), _MOST_RUNS):
        remembered = _read(path)
        if remembered is not None:
            places.setdefault((remembered.url, remembered.name), remembered)
    return sorted(places.values(), key=lambda place: place.submitted_at or 0.0, reverse=True)


def cluster_of(place: RunPlace, timeout_s: float = 20.0) -> Cluster:
    """Returns the cluster that the run was submitted to, or a command's default cluster."""
    return find_cluster(place.address, timeout_s)


def controller_alive(place: RunPlace, timeout_s: float = _QUICK_S) -> bool | None:
    """Returns whether the run's controller is alive; None if its cluster cannot be asked."""
    try:
        dashboard = cluster_of(place, timeout_s).dashboard
        name = urllib.parse.quote(f"raypp/{cluster_name(place.url, place.name)}", safe="", errors="replace")
        query = f"/api/v0/actors?filter_keys=name&filter_predicates=%3D&filter_values={name}&limit=1000"
        actors = dashboard.get_json(query)["data"]["result"]["result"]
        if any(actor["state"] != "DEAD" for actor in actors):
            return True
        return bool(living_jobs(dashboard, place))
    except (RayppError, KeyError, TypeError):
        return None


def cluster_fault(place: RunPlace) -> tuple[str, bool]:
    """Returns why the run's cluster does not answer, empty if it does, and whether it is known to
    be gone: it was on this machine, where nothing listens any more."""
    try:
        cluster_of(place, _QUICK_S).dashboard.ray_version()
    except RayppError as error:
        fault = error.problems[0].fault
        left, here = local.remains(), place.address is not None and is_loopback(place.address)
        if left is not None and left.dashboard == place.address and left.ray.find() is None:
            return fault, True
        return fault, here and os.strerror(errno.ECONNREFUSED) in fault
    return "", False


def active_runs(cluster: Cluster) -> list[RunPlace]:
    """Returns the runs of a cluster whose Ray job has not ended."""
    lend_store_settings(cluster.embedded)
    return [place for place in _of_cluster(cluster) if living_jobs(cluster.dashboard, place)]


def living_jobs(dashboard: Dashboard, place: RunPlace) -> list[str]:
    """Returns the run's unfinished Ray jobs; a new one may not have a controller yet."""
    return [str(job["submission_id"]) for job in _jobs(dashboard, place) if job["status"] not in FINAL_JOB_STATES]


def forget_run(place: RunPlace) -> None:
    """Removes a run that has ended from what this machine and its cluster remember."""
    _file(place.url, place.name).unlink(missing_ok=True)
    with contextlib.suppress(RayppError):
        dashboard = cluster_of(place, _QUICK_S).dashboard
        for job in _jobs(dashboard, place):
            dashboard.delete_job(str(job["submission_id"]))


def _jobs(dashboard: Dashboard, place: RunPlace) -> list[dict[str, Any]]:
    return [
        job
        for job in dashboard.jobs()
        if (its := job.get("metadata") or {}).get("raypp_run") == place.name
        and same_place(str(its.get("raypp_url")), place.url)
    ]


def _of_cluster(cluster: Cluster) -> list[RunPlace]:
    places: dict[tuple[str, str], RunPlace] = {}
    for job in sorted(cluster.dashboard.jobs(), key=lambda job: job.get("start_time") or 0):
        facts: dict[str, Any] = job.get("metadata") or {}
        if "raypp_run" not in facts or not job.get("submission_id"):
            continue
        started = (job.get("start_time") or time.time() * 1000) / 1000
        place = RunPlace(facts["raypp_url"], facts["raypp_run"], cluster.address, job["submission_id"], started)
        places[place.url, place.name] = place
    return list(places.values())


def _file(url: str, name: str) -> Path:
    return raypp_home() / "runs" / f"{cluster_name(url, name)}.json"


def _read(path: Path) -> RunPlace | None:
    try:
        return parse_as(RunPlace, read_file(path, _MOST_BYTES), str(path))
    except RayppError:
        return None


def hint_of_names(name: str, names: Sequence[str], form: str = "{}") -> str | None:
    """Returns a hint for an unknown name: a similar name, or all names; None if there are none.
    `form`: format of a similar name, with `{}` as its place."""
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {form.format(close[0])}?"
    if not names:
        return None
    return f"existing runs: {', '.join(names[:_MAX_NAMES])}{' …' if len(names) > _MAX_NAMES else ''}"


def _unknown(name: str, names: list[str]) -> JobError:
    hint = hint_of_names(name, names, "'{}'")
    elsewhere = "use URL/NAME for a run submitted from another machine"
    fix = hint if hint and hint.endswith("?") else f"{hint or 'no run was submitted from here'}; {elsewhere}"
    return JobError(Problem("RUN", f"there is no run {name!r}", fix))
