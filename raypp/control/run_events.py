"""The events of a run that the controller records. People read them; nothing else does."""

from __future__ import annotations

from collections.abc import Iterable

from raypp.control.machine import Finish, Machine
from raypp.control.recovery.policy import describe, root_cause
from raypp.control.seats import Rank
from raypp.records import END_EVENTS, Event, RankFailure, Requests
from raypp.state.checkpoint.commit import COMMITTING_RANK, Commit
from raypp.state.run_records.status import date_and_clock


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
    `resumed`). `kept`: how many of the `world` processes are reused. `memory`: whether the ranks
    also keep snapshots in host memory."""
    failure = root_cause(machine.history[-1].failures)
    newest = machine.committed_step
    start = "the beginning" if newest is None else f"the checkpoint of step {newest}"
    if memory and not failure.kind.traits.taints_snapshots:
        start = f"a newer snapshot in memory if there is one, else {start}"
    pause = f" in {delay_s:g} s" if delay_s else ""
    message = f"a new attempt starts{pause} from {start}: {describe(failure)}; {kept} of {world} processes are reused"
    return Event("restarting", message, attempt=machine.attempt, details={"kept": kept})


def adoption_event(attempt: int, ranks: Iterable[Rank], since: float) -> Event:
    """A restarted controller takes over the ranks of a running attempt. `since`: when the earlier
    one last wrote, in seconds since 1970."""
    living = [rank for rank in ranks if not rank.ended]
    ran = f"{len(living)} ranks of attempt {attempt} kept running without it"
    message = f"the controller restarted; {ran} since {date_and_clock(since)}"
    details = {"pids": [rank.pid for rank in living]}
    return Event("controller_restarted", message, attempt=attempt, details=details)


def commit_event(commit: Commit) -> Event:
    """A checkpoint exists whose commit no rank reported."""
    message = f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects"
    details = {"bytes": commit.size, "objects": len(commit.objects)}
    return Event("committed", message, commit.created, commit.attempt, commit.step, COMMITTING_RANK, details=details)


def room_event(why: str, machine: Machine) -> Event:
    """A run of higher priority needs devices of this one. `why`: which. `machine`: after that."""
    then = "waits in the line" if machine.gives_way else "goes on with fewer ranks"
    return Event("room_asked", f"{why}; this run saves, and {then}", attempt=machine.attempt)


def stop_event(requests: Requests, attempt: int) -> Event:
    """The operator wants the run to end."""
    how = "after a last checkpoint" if requests.save_before_stop else "at once, without a checkpoint"
    details = {"save": requests.save_before_stop}
    return Event("stop_requested", f"asked to stop {how}", attempt=attempt, details=details)


def end_event(finish: Finish, attempt: int, step: int) -> Event:
    """The run has ended."""
    details = {"exit_code": finish.exit_code}
    message = finish.reason or f"after step {step}"
    return Event(END_EVENTS[finish.state], message, attempt=attempt, step=step, details=details)
