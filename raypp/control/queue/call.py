"""`python -m raypp.control.queue.call METHOD ARGUMENTS`, inside a cluster: puts a run into the
line, follows its place, shows and changes the line, and takes runs out."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from raypp.control.calls import serve
from raypp.control.queue.ticket import Ticket, moved_before, place_of
from raypp.errors import JobError
from raypp.untrusted.text import shell_word

_LOOK_S, _VIEW_S = 1.0, 5.0
_SAY_AGAIN_S = 60.0


def join(place: str, detach: str) -> Iterator[dict[str, Any]]:
    """Puts a run into the line, or a new submission of it in place of the earlier one. Yields its
    place when that changes, and that it has left. `place`: the key of its ticket in Ray's key-value
    store. `detach`: `1` yields only the first."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_get

    from raypp.control.queue import cluster_view

    ticket = Ticket.read(_internal_kv_get(place) or b"", "the ticket")
    _internal_kv_del(place)
    before = cluster_view.read(ticket.name)
    if (before is None or before.submission_id != ticket.submission_id) and not cluster_view.job_state(ticket):
        if not _internal_kv_exists(ticket.document["runtime_env"]["working_dir"]):
            yield {"state": "lost"}  # this head has begun anew, or the run was cancelled
            return
        if before is not None:
            cluster_view.remove(before)
        cluster_view.write(ticket)
        cluster_view.wake()
    devices, said, said_at, look_at = cluster_view.Devices(), None, 0.0, 0.0
    while (now := cluster_view.read(ticket.name)) is not None and not now.started:
        time.sleep(_LOOK_S if said else 0.0)
        if time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + _VIEW_S
        told = place_of(ticket.run, ticket.url, cluster_view.view(cluster_view.Line.read(), devices))
        known = told and (told["place"], told["before"], told["rules"])
        if told is not None and (known != said or time.monotonic() - said_at > _SAY_AGAIN_S):
            yield told
            said, said_at = known, time.monotonic()
            if detach == "1":
                return
    yield {"state": "started" if now is not None or cluster_view.job_state(ticket) else "cancelled"}


def show() -> Iterator[dict[str, Any]]:
    """Yields the line."""
    from raypp.control.queue import cluster_view

    yield cluster_view.view(cluster_view.Line.read(), cluster_view.Devices())


def cancel(run: str, url: str) -> Iterator[dict[str, Any]]:
    """Takes a waiting run out of the line, if there is one. Yields the `found` ones, with `url` and
    `number`, all names in `waiting`, and why it is `refused`. `url`: of its store; empty: any."""
    from raypp.control.queue import cluster_view

    waiting = cluster_view.Line.read().waiting
    found = _named(waiting, run, url)
    answer = _found(found, waiting)
    if len(found) == 1 and found[0].gave_way:
        fix = f"`raypp stop {shell_word(run)}` ends it; its checkpoint stays"
        answer["refused"] = ["NAME", f"{run} has begun, and waits because it gave way", fix]
    elif len(found) == 1:
        cluster_view.remove(found[0])
        cluster_view.wake()
    yield answer


def move(run: str, url: str, other: str, other_url: str) -> Iterator[dict[str, Any]]:
    """Gives a run that waits the place before another's. Yields what `cancel` does, for the first
    run of which there is not one, and why the move is `refused`."""
    from raypp.control.queue import cluster_view

    waiting = cluster_view.Line.read().waiting
    ones, others = _named(waiting, run, url), _named(waiting, other, other_url)
    answer = _found(ones if len(ones) != 1 else others, waiting) | {"which": "NAME" if len(ones) != 1 else "--before"}
    if len(ones) == len(others) == 1 and ones != others:
        try:
            cluster_view.write(moved_before(waiting, ones[0], others[0]))
            cluster_view.wake()
        except JobError as error:
            answer |= {"refused": ["--before", error.problems[0].fault, error.problems[0].fix]}
    yield answer


def rule(node: str, document: str) -> Iterator[dict[str, Any]]:
    """Puts a rule in force, or with no document takes it back. Yields the `rules` before."""
    from raypp.control.queue import cluster_view, rules

    before = rules.read()
    if document:
        rules.write(rules.Rule.parse(document.encode(), "the rule"))
    else:
        rules.remove(node)
    cluster_view.wake()
    yield {"rules": [one.node for one in before]}


def _named(waiting: list[Ticket], run: str, url: str) -> list[Ticket]:
    return [one for one in waiting if one.run == run and url in ("", one.url)]


def _found(found: list[Ticket], waiting: list[Ticket]) -> dict[str, Any]:
    return {"found": [{"url": one.url, "number": one.number} for one in found], "waiting": [one.run for one in waiting]}


if __name__ == "__main__":
    calls: tuple[Callable[..., Iterator[dict[str, Any]]], ...] = (join, show, cancel, move, rule)
    method, *arguments = sys.argv[1:]
    serve(lambda: {one.__name__: one for one in calls}[method](*arguments))
