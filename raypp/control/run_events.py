"""The events of a run that the controller records, and what a restarted controller reads back from
them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from raypp.checkpoint.commit import COMMITTING_RANK, Commit
from raypp.control.machine import Finish, Machine
from raypp.control.seats import Rank
from raypp.failure_kinds import FailureKind
from raypp.mesh.shapes import Shape
from raypp.records import Event, RankFailure, Requests, RunState
from raypp.recovery.policy import AttemptEnd, describe, root_cause

_ENDS = frozenset(state.lower() for state in RunState if state.final)
_OF_ONE_SUBMISSION = _ENDS | {"submitted", "device_chosen", "rank_failed", "reshaped", "stop_requested"}
"""Kinds of events that mean nothing to the next submission of the run."""


def failure_event(failure: RankFailure, attempt: int) -> Event:
    """A rank failed."""
    details = {"kind": failure.kind, "cause": failure.cause, "pid": failure.pid, "label": failure.label}
    known = failure.rank >= 0
    return Event(
        "rank_failed",
        f"{failure.label} (rank {failure.rank}) on {failure.node}: {failure.cause}" if known else failure.cause,
        attempt=attempt,
        step=failure.step,
        rank=failure.rank if known else None,
        node=failure.node,
        details={**details, "evidence": failure.details},
    )


def seat_events(ranks: Iterable[Rank], attempt: int) -> list[Event]:
    """Which process has which seat."""
    events = []
    for rank in ranks:
        seat = rank.seat
        if seat is None:
            continue
        message = f"rank {seat.rank} is {seat.label} on {seat.node}, pid {rank.pid}, interface {seat.interface}"
        details = {"coordinates": seat.coordinates.as_dict(), "pid": rank.pid, "label": seat.label}
        events.append(Event("seated", message, attempt=attempt, rank=seat.rank, node=seat.node, details=details))
    return events


def restart_event(machine: Machine, delay_s: float, kept: int, world: int, memory: bool) -> Event:
    """A new attempt follows. Its ranks find out from which step, and report it (`restored`,
    `resumed`).

    Args:
        kept: How many of the `world` processes are reused.
        memory: Whether the ranks also keep snapshots in host memory.
    """
    failure = root_cause(machine.history[-1].failures)
    newest = machine.committed_step
    start = "the beginning" if newest is None else f"the checkpoint of step {newest}"
    if memory and not failure.kind.traits.taints_snapshots:
        start = f"a newer snapshot in memory if there is one, else {start}"
    pause = f" in {delay_s:g} s" if delay_s else ""
    message = f"a new attempt starts{pause} from {start}: {describe(failure)}; {kept} of {world} processes are reused"
    return Event("restarting", message, attempt=machine.attempt, details={"kept": kept})


def adoption_event(attempt: int, ranks: Iterable[Rank]) -> Event:
    """A restarted controller takes over the ranks of a running attempt."""
    living = [rank for rank in ranks if not rank.ended]
    message = f"the controller restarted; {len(living)} ranks of attempt {attempt} kept running without it"
    details = {"pids": [rank.pid for rank in living]}
    return Event("controller_restarted", message, attempt=attempt, details=details)


def stack_event(rank: Rank, text: str, attempt: int) -> Event:
    """The stacks of a rank's threads while the attempt hangs."""
    message = f"the stacks of {rank.label} (rank {rank.rank}) on {rank.node}, pid {rank.pid}"
    return Event("stacks", message, attempt=attempt, rank=rank.rank, node=rank.node, details={"stacks": text})


def preemption_event(rank: Rank, why: str, attempt: int) -> Event:
    """A rank's process or node is about to be preempted."""
    message = f"{rank.label} (rank {rank.rank}) on {rank.node}: {why}; saving a checkpoint before it leaves"
    return Event("preemption_notice", message, attempt=attempt, rank=rank.rank, node=rank.node)


def commit_event(commit: Commit) -> Event:
    """A checkpoint exists whose commit no rank reported."""
    message = f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects"
    details = {"bytes": commit.size, "objects": len(commit.objects)}
    return Event("committed", message, commit.created, commit.attempt, commit.step, COMMITTING_RANK, details=details)


def stop_event(requests: Requests, attempt: int) -> Event:
    """The operator wants the run to end."""
    how = "after a last checkpoint" if requests.save_before_stop else "at once, without a checkpoint"
    details = {"save": requests.save_before_stop}
    return Event("stop_requested", f"asked to stop {how}", attempt=attempt, details=details)


def end_event(finish: Finish, attempt: int, step: int) -> Event:
    """The run has ended; holds the exit code for commands that ask when no process of the run is
    left."""
    details = {"exit_code": finish.exit_code}
    return Event(finish.state.lower(), finish.reason or _end_message(step), attempt=attempt, step=step, details=details)


# Reading back -------------------------------------------------------------------------------------


def with_submission(event: Event, submission: str) -> Event:
    """Returns the event with its submission, by which `own_events` finds it.

    Args:
        submission: The Ray job of the submission; empty if unknown.
    """
    if not submission or event.kind not in _OF_ONE_SUBMISSION:
        return event
    return replace(event, details={**event.details, "submission_id": submission})


def own_events(events: Iterable[Event], submission: str) -> list[Event]:
    """Returns a run's events without what concerns its other submissions only, by attempt.

    Their times do not decide: clocks step back, and the next submission may be led on another host.
    What has no submission is another one's, too: an older raypp recorded it, and a run is led by
    one raypp from its submission to its end.

    Args:
        submission: As in `with_submission`; if empty, all events are returned as they are.
    """
    if not submission:
        return list(events)
    own = (
        event
        for event in events
        if event.kind not in _OF_ONE_SUBMISSION or event.details.get("submission_id") == submission
    )
    return sorted(own, key=lambda event: (event.kind != "submitted", event.attempt))


def is_begun(events: Iterable[Event], submission: str) -> bool:
    """Returns whether the submission has been recorded; True if it is unknown (empty)."""
    return not submission or any(event.kind == "submitted" for event in own_events(events, submission))


def recorded_end(events: Iterable[Event]) -> Finish | None:
    """Returns the end that `end_event` recorded since the run was last submitted; None when it has
    not ended."""
    end = None
    for event in events:
        if event.kind == "submitted":
            end = None
        elif event.kind in _ENDS:
            reason = "" if event.message == _end_message(event.step or 0) else event.message
            state = RunState(event.kind.upper())
            code = event.whole("exit_code")
            end = Finish(state, reason, int(state is RunState.FAILED) if code is None or code > 255 else code)
    return end


def failed_attempts(events: Iterable[Event]) -> tuple[AttemptEnd, ...]:
    """Returns how the attempts failed since the run was last submitted, oldest first.

    Args:
        events: Of the run, in the order they were recorded.
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
    return tuple(AttemptEnd(attempt, tuple(found), committed[attempt]) for attempt, found in sorted(failures.items()))


def last_shape(events: Iterable[Event]) -> Shape | None:
    """Returns the mesh the run had last since it was last submitted; None: that of the job."""
    shape = None
    for event in events:
        if event.kind == "submitted":
            shape = None
        elif event.kind == "reshaped":
            shape = _shape(event.details.get("to")) or shape
    return shape


def _shape(sizes: Any) -> Shape | None:
    """Returns the mesh of a `reshaped` event; None if it names none."""
    names = {one.name for one in fields(Shape)}
    if not isinstance(sizes, dict) or set(sizes) != names:
        return None
    return Shape(**sizes) if all(type(size) is int and size > 0 for size in sizes.values()) else None


def requested_stop(events: Iterable[Event]) -> Requests | None:
    """Returns the operator's stop request since the run was last submitted; None without one."""
    request = None
    for event in events:
        if event.kind == "submitted":
            request = None
        elif event.kind == "stop_requested":
            request = Requests(stop=True, save_before_stop=bool(event.details.get("save", True)))
    return request


def last_device(events: Iterable[Event]) -> str | None:
    """Returns the device chosen when the run was last submitted; None when the job names it."""
    chosen = [event.details.get("device") for event in events if event.kind == "device_chosen"]
    return str(chosen[-1]) if chosen and chosen[-1] else None


def _failure(event: Event) -> RankFailure:
    facts = event.details
    rank = -1 if event.rank is None else event.rank
    label, kind, cause = (str(facts.get(key, "")) for key in ("label", "kind", "cause"))
    return RankFailure(rank, label, event.node, event.whole("pid") or 0, FailureKind.read(kind), cause, event.step or 0)


def _end_message(step: int) -> str:
    return f"after step {step}"
