"""What an earlier life of the controller knew of failures, of the mesh and of the operator's wish, read back from the
events it told."""

from __future__ import annotations

from collections.abc import Iterable

from raypp.failure_kinds import FailureKind
from raypp.records import Event, RankFailure, Requests
from raypp.recovery.elastic import Shape
from raypp.recovery.policy import AttemptEnd


def failed_attempts(events: Iterable[Event]) -> tuple[AttemptEnd, ...]:
    """How the attempts failed since the run was last submitted, oldest first.

    Args:
        events: Of the run, in the order they were told.
    """
    failures: dict[int, list[RankFailure]] = {}
    newest: int | None = None
    committed: dict[int, int | None] = {}
    for event in events:
        if event.kind == "submitted":
            failures, committed = {}, {}
        elif event.kind == "committed" and event.step is not None:
            newest = event.step if newest is None else max(newest, event.step)
        elif event.kind == "rank_failed":
            failures.setdefault(event.attempt, []).append(_failure(event))
            committed[event.attempt] = newest
    return tuple(AttemptEnd(attempt, tuple(told), committed[attempt]) for attempt, told in sorted(failures.items()))


def last_shape(events: Iterable[Event]) -> Shape | None:
    """The mesh that the run had last since it was last submitted; None: that of the job."""
    shape = None
    for event in events:
        if event.kind == "submitted":
            shape = None
        elif event.kind == "reshaped":
            shape = Shape(**{name: int(size) for name, size in event.details["to"].items()})
    return shape


def stop_asked(events: Iterable[Event]) -> Requests | None:
    """What the operator wants since the run was last submitted; None: that it goes on."""
    asked = None
    for event in events:
        if event.kind == "submitted":
            asked = None
        elif event.kind == "stop_requested":
            asked = Requests(stop=True, save_before_stop=bool(event.details.get("save", True)))
    return asked


def last_device(events: Iterable[Event]) -> str | None:
    """The device that was chosen when the run was last submitted; None: nobody had to choose."""
    chosen = [event.details.get("device") for event in events if event.kind == "device_chosen"]
    return str(chosen[-1]) if chosen and chosen[-1] else None


def _failure(event: Event) -> RankFailure:
    facts = event.details
    rank = -1 if event.rank is None else event.rank
    label, kind, cause = (str(facts.get(key, "")) for key in ("label", "kind", "cause"))
    pid = int(facts.get("pid", 0))
    return RankFailure(rank, label, event.node, pid, FailureKind.read(kind), cause, event.step or 0)
