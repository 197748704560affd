"""The line of a cluster, from outside: what `raypp submit` and `raypp queue` ask for."""

import getpass
import json
import secrets
import time
import urllib.parse
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from typing import Any

from raypp.control.cluster_call import Call, ask, reports_of
from raypp.control.clusters.find import Cluster
from raypp.control.queue.ticket import Ticket
from raypp.errors import JobError, Problem
from raypp.untrusted.text import shell_word

_LONG_S = 1e7
_MODULE = "raypp.control.queue.call"


def user_name(given: str | None) -> str:
    """Returns the user's name for the record: as given, or the system's. Nothing checks it."""
    try:
        return given or getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "unknown"


def line_exists(cluster: Cluster) -> bool:
    """Returns whether runs wait on a cluster: then its line has a leader."""
    name = urllib.parse.quote("raypp/queue", safe="")
    query = f"/api/v0/actors?filter_keys=name&filter_predicates=%3D&filter_values={name}&limit=1000"
    return any(actor["state"] != "DEAD" for actor in cluster.dashboard.get_json(query)["data"]["result"]["result"])


def join(cluster: Cluster, ticket: Ticket, *, detach: bool) -> Generator[dict[str, Any]]:
    """Puts a run into the line, unless it is there, and yields its place: see `call.join`. Raises
    UnreachableError: the cluster does not answer."""
    place = cluster.dashboard.put_package(f"_ray_pkg_{secrets.token_hex(16)}.zip", ticket.encoded())
    call = Call(f"queue {ticket.run}", _MODULE, ("join", place, str(int(detach))), timeout_s=_LONG_S)
    with closing(reports_of(cluster, call)) as reports:
        yield from (report["answer"] for report in reports)


def show(cluster: Cluster) -> dict[str, Any]:
    """Returns the line and the runs that hold devices: see `cluster_view.view`."""
    return _ask(cluster, "show")


def cancel(cluster: Cluster, run: str, url: str = "") -> dict[str, Any]:
    """Takes a run that waits out of the line. Returns the `url` of its store and the `number` of
    its spec. `url`: of its store; empty: of whatever store. Raises JobError: no such run waits,
    several do, or it has begun."""
    return _the_one(_ask(cluster, "cancel", run, url), "NAME", run)


def move(cluster: Cluster, url: str, run: str, other_url: str, other: str) -> None:
    """Gives a run that waits the place before another's. Raises JobError: one does not wait, or
    several of its name do; or a run would pass one of higher priority."""
    answer = _ask(cluster, "move", run, url, other, other_url)
    _the_one(answer, answer["which"], run if answer["which"] == "NAME" else other)


def pause(cluster: Cluster, user: str | None) -> bool:
    """Pauses the line; with no `user`, resumes it. Returns whether it was paused."""
    return "" in _rule(cluster, "", user)


def hold(cluster: Cluster, node: str, user: str | None, until: float | None = None) -> list[str]:
    """Holds a node; with no `user`, releases it. `node`: its address, host name or id. Returns its
    addresses. Raises JobError: there is no such node, or it is not held; names those that are."""
    nodes = cluster.dashboard.nodes()
    found = sorted({one.ip for one in nodes if node in (one.ip, one.hostname, one.node_id)})
    if not found and user is not None:
        there = ", ".join(sorted({f"{one.ip} ({one.hostname})" for one in nodes}))
        raise JobError(Problem("NODE", f"the cluster has no node {node}", f"it has {there or 'none'}"))
    before = [held for one in found or [node] for held in _rule(cluster, one, user, until) if held]
    if user is None and not {*before} & {*found, node}:
        raise JobError(Problem("NODE", f"{node} is not held", f"held: {', '.join(sorted({*before})) or 'no node'}"))
    return found or [node]


def time_of(text: str) -> float:
    """Returns when a hold ends, in seconds since 1970: the next time that the clock shows 18:00, or
    at a date. Raises JobError: it cannot be read, or has passed."""
    now = datetime.now()
    for day in ("", f"{now:%Y-%m-%d} ", f"{now + timedelta(days=1):%Y-%m-%d} "):
        with suppress(ValueError, OverflowError):
            when = datetime.strptime(day + text, "%Y-%m-%d %H:%M")
            if when > now:
                return when.timestamp()
    fix = 'write the local time, 18:00, or "2026-12-31 18:00"'
    raise JobError(Problem("--until", f"{text!r} is not a time to come", fix))


def _ask(cluster: Cluster, method: str, *arguments: str) -> dict[str, Any]:
    return ask(cluster, Call(f"queue-{method}", _MODULE, (method, *arguments)))


def _rule(cluster: Cluster, node: str, user: str | None, until: float | None = None) -> Sequence[str]:
    rule = {"node": node, "user": user, "since": time.time(), "until": until}
    before: list[str] = _ask(cluster, "rule", node, json.dumps(rule) if user is not None else "")["rules"]
    return before


def _the_one(answer: dict[str, Any], place: str, run: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = answer["found"]
    if len(found) > 1:
        forms = " or ".join(shell_word(f"{one['url'].rstrip('/')}/{run}") for one in found)
        raise JobError(Problem(place, f"{len(found)} runs named {run!r} wait", f"use {forms}"))
    if not found:
        fix = (
            f"if it runs, `raypp stop {shell_word(run)}` ends it; in the line: {', '.join(answer['waiting']) or 'none'}"
        )
        raise JobError(Problem(place, f"{run} does not wait", fix))
    if refused := answer.get("refused"):
        raise JobError(Problem(*refused))
    return found[0]
