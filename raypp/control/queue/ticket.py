"""A run's ticket: its place in the line, in its store, and with its Ray job in the cluster."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from raypp.control.clusters.known_runs import cluster_name
from raypp.control.queue.line import PRIORITIES, Need, Priority, Waiting, turn_of
from raypp.errors import CheckpointError, JobError, Problem
from raypp.state.checkpoint.layout import queued_key
from raypp.state.run_records.status import date_and_clock
from raypp.storage import NotFound, ObjectStore, StoreError
from raypp.untrusted.documents import Bounds, Count, Seconds, Time, parse_as
from raypp.untrusted.text import shell_word

_BOUNDS = Bounds(size=4 << 20)
_LEFT = {
    "started": "has its turn",
    "cancelled": "has left the line",
    "lost": "the cluster no longer knows it; `raypp submit JOB --resume` puts it back into its place",
}


@dataclass(frozen=True)
class Ticket:
    """A submission that waits. `number`: of its spec. `seconds`: planned; None: unknown.
    `document`: the Ray job that begins the run; not in the store. `at`: when the store took it, by
    its clock; in the store itself only that of an earlier ticket, whose place this one keeps.
    `sent`: by the submitter's clock. `started`: its job was submitted, its devices are not
    placed. `moved`: its turn without the nonce, once somebody has moved it. `after`: runs that have
    to succeed first, as URL/NAME. `gave_way`: the run has begun, and its controller waits."""

    run: str
    url: str
    number: Count
    user: str
    priority: Priority
    need: Need
    seconds: Seconds | None
    document: dict[str, Any]
    at: Time | None = None
    started: bool = False
    moved: tuple[float, float, float, float] | None = None
    after: tuple[str, ...] = ()
    gave_way: bool = False
    sent: Time = field(default_factory=time.time)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @cached_property
    def name(self) -> str:
        """What the cluster calls the run."""
        return cluster_name(self.url, self.run)

    @cached_property
    def waiting(self) -> Waiting:
        turn = turn_of(self.at or self.sent, self.priority, self.sent, self.nonce)
        turn = (*self.moved, self.nonce) if self.moved else turn
        return Waiting(self.name, turn, self.need, self.seconds, PRIORITIES[self.priority])

    @property
    def submission_id(self) -> str:
        return str(self.document["submission_id"])

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes, place: str) -> Ticket:
        """Parses a ticket. Raises CheckpointError: it is damaged, or of another raypp."""
        fix = "submit the run again with --resume: it keeps its place"
        return parse_as(cls, data, place, _BOUNDS, CheckpointError, fix, kind="a ticket", unknown="ignore")


def write_ticket(store: ObjectStore, ticket: Ticket) -> Ticket:
    """Writes a ticket, and returns it with the time at which the store took it."""
    key = queued_key(ticket.run, ticket.number)
    stored = replace(ticket, document={"submission_id": ticket.submission_id})  # without what names keys
    store.put(key, stored.encoded(), if_absent=True)
    if (info := store.head(key)) is None:
        raise StoreError(f"{store.url}/{key} is gone", "somebody deletes the run; submit it again")
    return ticket if ticket.at is not None else replace(ticket, at=info.modified)


def read_ticket(store: ObjectStore, run: str, number: int) -> Ticket | None:
    """Returns a submission's ticket, if it waited. Raises CheckpointError: it is damaged."""
    key = queued_key(run, number)
    try:
        return Ticket.read(store.get(key, 0, _BOUNDS.size + 1), f"{store.url}/{key}")
    except NotFound:
        return None


def kept_place(store: ObjectStore, run: str, number: int) -> float | None:
    """Returns the place of the submission before if that never began: a resume keeps it."""
    before = read_ticket(store, run, number - 1) if number > 1 else None
    if before is None or any(True for _ in store.list(f"{run}/attempts/")):
        return None
    info = store.head(queued_key(run, number - 1))
    return before.at if before.at is not None or info is None else info.modified


def waited_s(store: ObjectStore, run: str) -> float | None:
    """Returns for how many seconds a run has waited in line so far, all submissions together, until
    each claimed an attempt or ended, also after it gave way; None if none ever waited."""
    if not (came := [info.modified for info in store.list(f"{run}/queued")]):
        return None
    left = [info.modified for part in ("attempts/", "end") for info in store.list(f"{run}/{part}")]
    total, since = 0.0, None
    for at, leaves in sorted([*((at, False) for at in came), *((at, True) for at in left)]):
        if leaves and since is not None:
            total, since = total + at - since, None
        elif not leaves and since is None:
            since = at
    return total if since is None else total + max(0.0, time.time() - since)


def place_of(run: str, url: str, shown: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a run's place among what `cluster_view.view` returned; None: it does not wait."""
    before: list[str] = []
    for one in shown["waiting"]:
        if (one["run"], one["url"]) == (run, url):
            amounts = [
                (one["run"], one["gpus"] or one["cpus"], "GPU" if one["gpus"] else "CPU") for one in shown["running"]
            ]
            held = [f"{name} has {amount:g} {kind}" for name, amount, kind in amounts]
            return {"state": "waiting", "before": before, "held": held, "rules": shown["rules"], **one}
        before.append(one["run"])
    return None


def moved_before(line: Sequence[Ticket], one: Ticket, other: Ticket) -> Ticket:
    """Returns a ticket with the place directly before another's. `line`: in order. Raises JobError:
    a run would pass one of higher priority; names both."""
    others = [ticket for ticket in line if ticket is not one]
    place, was = others.index(other), line.index(one)
    passes = [(one, passed) for passed in others[place:was]] + [(passing, one) for passing in others[was:place]]
    for low, high in passes:
        if PRIORITIES[low.priority] > PRIORITIES[high.priority]:
            fault = f"{low.run} has priority {low.priority} and would pass {high.run}, which has {high.priority}"
            fix = f"`raypp queue cancel {shell_word(low.run)}`, and submit it with --priority {high.priority}"
            raise JobError(Problem("--before", fault, fix))
    first, second, third, rank, _ = other.waiting.turn
    above = others[place - 1].waiting.turn if place else None
    rank = (above[3] + rank) / 2 if above and above[:3] == (first, second, third) else rank - 1.0
    return replace(one, moved=(first, second, third, rank))


def circle(run: str, after: Sequence[str], waiting: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the runs that would wait for each other. `waiting`: what each run comes after."""
    for one in after:
        if one == run:
            return [run]
        rest = {name: others for name, others in waiting.items() if name != one}
        if found := circle(run, waiting.get(one, ()), rest):
            return [run, one, *found[1:]]
    return []


def rules_in_words(shown: Mapping[str, Any]) -> list[str]:
    """Returns in words who has paused the line or holds nodes of it, by `cluster_view.view`."""
    words = []
    for rule in shown["rules"]:
        what = f"{rule['node']} is held" if rule["node"] else "the line is paused"
        until = "" if rule["until"] is None else f" until {date_and_clock(rule['until'])}"
        words.append(f"{what} by {rule['user']} since {date_and_clock(rule['since'])}{until}")
    return words


def place_in_words(place: Mapping[str, Any]) -> str:
    """Returns what `call.join` yielded in words."""
    if place["state"] != "waiting":
        return _LEFT[place["state"]]
    before, when = place["before"], place["expected_start"]
    words = f"place {place['place']} in the line"
    words += f", after {', '.join(before[:3])}" if before else ""
    words += f" and {len(before) - 3} more" if len(before) > 3 else ""
    words += f" ({', '.join(place['held'])})" if place["held"] else ""
    words += "" if when is None else f"; expected to start {date_and_clock(when)}"
    words += f"; waits for the end of {', '.join(place['after'])}" if place["after"] else ""
    return "; ".join([words, *rules_in_words(place)])
