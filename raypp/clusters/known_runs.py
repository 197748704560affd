"""The runs this user knows: those submitted from this machine, and those the reachable cluster remembers."""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypp.clusters.dashboard import FINAL_JOB_STATES, Dashboard
from raypp.clusters.find import Cluster, find_cluster, lend_store_settings
from raypp.clusters.user_folder import raypp_home, write_private
from raypp.errors import JobError, Problem, RayppError

_QUICK_S = 3.0
_MAX_NAMES = 8


@dataclass(frozen=True)
class RunPlace:
    """Where a run is.

    Attributes:
        url: Of the store, without the run's name.
        name: The run's name.
        address: The dashboard of its cluster; None when nobody knows.
        submission_id: Its Ray job; empty when nobody knows.
        submitted_at: Seconds since 1970; None when nobody knows.
    """

    url: str
    name: str
    address: str | None
    submission_id: str = ""
    submitted_at: float | None = None


def remember_run(place: RunPlace) -> None:
    """Writes a submitted run down on this machine; a later one of that name replaces it."""
    write_private(_file(place.name), json.dumps(asdict(place)))


def locate_run(argument: str) -> RunPlace:
    """The run of a name, or of URL/NAME.

    Raises:
        JobError: Nobody here knows a run of that name.
    """
    lend_store_settings()
    argument = argument.rstrip("/")
    if "/" in argument:
        url, _, name = argument.rpartition("/")
        known = next((one for one in known_runs() if (one.url.rstrip("/"), one.name) == (url, name)), None)
        return known or RunPlace(url, name, None)
    place = _read(_file(argument))
    if place is not None:
        return place
    places = known_runs()
    for one in places:
        if one.name == argument:
            return one
    raise _unknown(argument, [one.name for one in places])


def known_runs() -> list[RunPlace]:
    """Runs submitted from here, and runs of the cluster that can be reached; newest first."""
    lend_store_settings()
    found = {}
    with contextlib.suppress(RayppError):
        for place in _of_cluster(find_cluster(timeout_s=_QUICK_S)):
            found[place.url, place.name] = place
    for path in (raypp_home() / "runs").glob("*.json"):
        remembered = _read(path)
        if remembered is not None:
            found.setdefault((remembered.url, remembered.name), remembered)
    return sorted(found.values(), key=lambda place: place.submitted_at or 0.0, reverse=True)


def cluster_of(place: RunPlace, timeout_s: float = 20.0) -> Cluster:
    """The cluster the run was given to, or the one a command without an address means."""
    return find_cluster(place.address, timeout_s)


def controller_alive(place: RunPlace) -> bool | None:
    """Whether the run's controller lives; None when its cluster cannot be asked."""
    try:
        dashboard = cluster_of(place, _QUICK_S).dashboard
        query = f"/api/v0/actors?filter_keys=name&filter_predicates=%3D&filter_values=raypp%2F{place.name}&limit=1000"
        actors = dashboard.get_json(query)["data"]["result"]["result"]
        if any(actor["state"] != "DEAD" for actor in actors):
            return True
        return bool(living_jobs(dashboard, place))
    except (RayppError, KeyError, TypeError):
        return None


def living_jobs(dashboard: Dashboard, place: RunPlace) -> list[str]:
    """The run's Ray jobs that have not ended; one that was just accepted has made no controller yet."""
    return [
        str(job["submission_id"])
        for job in dashboard.jobs()
        if (job.get("metadata") or {}).get("raypp_run") == place.name
        and (job.get("metadata") or {}).get("raypp_url") == place.url
        and job["status"] not in FINAL_JOB_STATES
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


def _file(name: str) -> Path:
    return raypp_home() / "runs" / f"{name}.json"


def _read(path: Path) -> RunPlace | None:
    try:
        return RunPlace(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def hint_of_names(name: str, names: Sequence[str], form: str = "{}") -> str | None:
    """What to say when there is no run of this name: the one that is close, or all (None: there are none).

    Args:
        form: How to write a close name down, around `{}`.
    """
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {form.format(close[0])}?"
    if not names:
        return None
    return f"there are: {', '.join(names[:_MAX_NAMES])}{' …' if len(names) > _MAX_NAMES else ''}"


def _unknown(name: str, names: list[str]) -> JobError:
    hint = hint_of_names(name, names, "'{}'")
    elsewhere = "a run of another machine is named as URL/NAME"
    fix = hint if hint and hint.endswith("?") else f"{hint or 'no run was submitted from here'}; {elsewhere}"
    return JobError(Problem("RUN", f"there is no run {name!r}", fix))
