"""What the controller says of what happened: the events of a run that no rank tells; and what it reads from them."""

from __future__ import annotations

from collections.abc import Iterable

from raypp.checkpoint.commit import COMMITTING_RANK, Commit
from raypp.control.machine import Finish, Machine
from raypp.control.seats import Rank
from raypp.records import Event, RankFailure, Requests, RunState
from raypp.recovery.policy import describe, root_cause

_ENDS = frozenset(state.lower() for state in RunState if state.final)


def failure_event(failure: RankFailure, attempt: int) -> Event:
    """A rank failed."""
    details = {"kind": failure.kind, "cause": failure.cause, "pid": failure.pid, "label": failure.label}
    return Event(
        "rank_failed",
        f"{failure.label} (rank {failure.rank}) on {failure.node}: {failure.cause}",
        attempt=attempt,
        step=failure.step,
        rank=failure.rank,
        node=failure.node,
        details={**details, "evidence": failure.details},
    )


def seat_events(ranks: Iterable[Rank], attempt: int) -> list[Event]:
    """Who sits where."""
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
    """Another attempt follows. From which step is for its ranks to find out (`restored`, `resumed`).

    Args:
        kept: How many of the `world` processes live on.
        memory: The ranks keep snapshots in memory, too.
    """
    failure = root_cause(machine.history[-1].failures)
    newest = machine.committed_step
    start = "the beginning" if newest is None else f"the checkpoint of step {newest}"
    if memory and not failure.kind.traits.taints_snapshots:
        start = f"a newer snapshot in memory, else from {start}"
    pause = f" in {delay_s:g} s" if delay_s else ""
    message = f"a new attempt{pause}, from {start}, because {describe(failure)}; {kept} of {world} processes go on"
    return Event("restarting", message, attempt=machine.attempt, details={"kept": kept})


def adoption_event(attempt: int, ranks: Iterable[Rank]) -> Event:
    """A later life of the controller goes on with what an earlier one started."""
    living = [rank for rank in ranks if not rank.ended]
    message = f"the controller was restarted; {len(living)} ranks of attempt {attempt} had gone on without it"
    details = {"pids": [rank.pid for rank in living]}
    return Event("controller_restarted", message, attempt=attempt, details=details)


def stack_event(rank: Rank, text: str, attempt: int) -> Event:
    """What a rank's threads did while the attempt stood still."""
    message = f"the stacks of {rank.label} (rank {rank.rank}) on {rank.node}, pid {rank.pid}"
    return Event("stacks", message, attempt=attempt, rank=rank.rank, node=rank.node, details={"stacks": text})


def notice_event(rank: Rank, why: str, attempt: int) -> Event:
    """A rank's process, or its node, was told to go."""
    message = f"{rank.label} (rank {rank.rank}) on {rank.node}: {why}; saving, then leaving"
    return Event("preemption_notice", message, attempt=attempt, rank=rank.rank, node=rank.node)


def commit_event(commit: Commit) -> Event:
    """A checkpoint exists, of whose commit no rank could tell."""
    message = f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects"
    details = {"bytes": commit.size, "objects": len(commit.objects)}
    return Event("committed", message, commit.created, commit.attempt, commit.step, COMMITTING_RANK, details=details)


def stop_event(requests: Requests, attempt: int) -> Event:
    """The operator wants the run to end."""
    how = "after a last checkpoint" if requests.save_before_stop else "at once, without a checkpoint"
    details = {"save": requests.save_before_stop}
    return Event("stop_requested", f"asked to stop {how}", attempt=attempt, details=details)


def end_event(finish: Finish, attempt: int, step: int) -> Event:
    """The run is over; says the exit code, for whoever asks when no process of the run is left."""
    details = {"exit_code": finish.exit_code}
    return Event(finish.state.lower(), finish.reason or _end_of(step), attempt=attempt, step=step, details=details)


def end_told(events: Iterable[Event]) -> Finish | None:
    """The end that `end_event` told since the run was last submitted; None: it goes on."""
    end = None
    for event in events:
        if event.kind == "submitted":
            end = None
        elif event.kind in _ENDS:
            reason = "" if event.message == _end_of(event.step or 0) else event.message
            state = RunState(event.kind.upper())
            end = Finish(state, reason, int(event.details.get("exit_code", state is RunState.FAILED)))
    return end


def _end_of(step: int) -> str:
    return f"after step {step}"
