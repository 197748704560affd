"""The controller's state machine, pure: `step(state, event) -> (state, commands)`.

It decides; `leader.py` carries out. So that whatever order events come in, at most one attempt is alive,
nothing starts after the end, and a run always ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from raypp.records import RankFailure, Requests, RunState
from raypp.recovery.elastic import Shape
from raypp.recovery.policies.default import DefaultPolicy
from raypp.recovery.policy import AttemptEnd, GiveUp, Policy, describe, root_cause


class Phase(StrEnum):
    """What the run is busy with, as decided here.

    How far the carrying out of one attempt has come is `attempt.AttemptPhase`: a run is LAUNCHING while its attempt is
    PLACING or STARTING, it is ENDING until the attempt is GONE, and while it is WAITING there is no attempt.
    """

    IDLE = "idle"
    LAUNCHING = "launching"
    RUNNING = "running"
    ENDING = "ending"
    WAITING = "waiting"
    DONE = "done"


@dataclass(frozen=True)
class Machine:
    """Everything a decision depends on.

    Attributes:
        policy: Says whether the run goes on after an attempt failed.
        state: What users see.
        phase: What goes on; LAUNCHING, RUNNING and ENDING are the phases with a living attempt.
        attempt: Number of the present or last attempt.
        restarts: Attempts started because one failed.
        committed_step: Newest commit known.
        stop: The operator wants the run to end.
        history: How attempts failed, oldest first.
        failures: Evidence of the present attempt.
        ending: What is to follow the present attempt, when that is decided already.
        error: The last failure, in words.
        shape: The mesh of the present or next attempt; None: that of the job.
        reshaping: The present attempt ends, or is asked to, so that the next has another mesh.
        grown_at: Newest commit when the mesh last grew.
        adopted: An earlier life started the present attempt, and may have asked it to end for a larger mesh.
    """

    policy: Policy = field(default_factory=DefaultPolicy)
    state: RunState = RunState.PENDING
    phase: Phase = Phase.IDLE
    attempt: int = 0
    restarts: int = 0
    committed_step: int | None = None
    stop: bool = False
    history: tuple[AttemptEnd, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    ending: Finish | None = None
    error: str | None = None
    shape: Shape | None = None
    reshaping: bool = False
    grown_at: int | None = None
    adopted: bool = False


# Events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The controller is up. `attempt` is the number of the last attempt an earlier life of it started."""

    attempt: int = 0
    committed_step: int | None = None
    interrupted: bool = False
    """An earlier life was interrupted: the next attempt is a restart."""
    adopted: bool = False
    """The attempt that the earlier life started still lives, and is led on: no restart."""
    history: tuple[AttemptEnd, ...] = ()
    """How attempts failed that earlier lives led."""
    shape: Shape | None = None
    """The mesh that the last attempt had; None: that of the job."""
    ending: Finish | None = None
    """The run is over, and no rank is left."""


@dataclass(frozen=True)
class Claimed:
    """The attempt got this number in the store."""

    attempt: int


@dataclass(frozen=True)
class Seated:
    """Every rank has its seat and runs."""


@dataclass(frozen=True)
class Committed:
    """A checkpoint exists."""

    step: int


@dataclass(frozen=True)
class RankFailed:
    """Evidence of a failure (also of the launch itself)."""

    failure: RankFailure


@dataclass(frozen=True)
class NoResources:
    """The cluster can never hold the mesh as it is."""

    reason: str


@dataclass(frozen=True)
class Reshape:
    """The run is better off with another mesh: a smaller one that there is room for, or a larger one again."""

    shape: Shape
    world: int
    """Ranks of the present mesh."""


@dataclass(frozen=True)
class Finished:
    """Every rank returned in order."""

    stopped: bool


@dataclass(frozen=True)
class AttemptGone:
    """No process is in the attempt any more."""


@dataclass(frozen=True)
class DelayOver:
    """The pause before the next attempt is over."""


@dataclass(frozen=True)
class StopAsked:
    """The operator wants the run to end."""

    save: bool = True


Happening: TypeAlias = (
    Start
    | Claimed
    | Seated
    | Committed
    | RankFailed
    | NoResources
    | Reshape
    | Finished
    | AttemptGone
    | DelayOver
    | StopAsked
)

# Commands -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start an attempt: claim a number, place, seat."""


@dataclass(frozen=True)
class EndAttempt:
    """End the attempt in every process; `AttemptGone` when that is done."""

    keep: bool = False
    """Processes that can are to take part in another attempt."""


@dataclass(frozen=True)
class Ask:
    """Hand the ranks a request."""

    requests: Requests


@dataclass(frozen=True)
class Wait:
    """`DelayOver` after this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """The run is over. `exit_code` is what a following command leaves with."""

    state: RunState
    reason: str = ""
    exit_code: int = 0


Command: TypeAlias = Launch | EndAttempt | Ask | Wait | Finish
Step: TypeAlias = tuple[Machine, tuple[Command, ...]]

_ALIVE = (Phase.LAUNCHING, Phase.RUNNING, Phase.ENDING)


def step(machine: Machine, event: Happening) -> Step:
    """What follows from an event. Events that come too late to matter change nothing."""
    if machine.phase is Phase.DONE:
        return machine, ()
    match event:
        case Start() if machine.phase is Phase.IDLE:
            return _start(machine, event)
        case Claimed() if machine.phase is Phase.LAUNCHING:
            return replace(machine, attempt=event.attempt, adopted=False), ()
        case Seated() if machine.phase is Phase.LAUNCHING:
            state = RunState.STOPPING if machine.stop else RunState.RUNNING
            return replace(machine, phase=Phase.RUNNING, state=state), ()
        case Committed():
            newest = event.step if machine.committed_step is None else max(machine.committed_step, event.step)
            return replace(machine, committed_step=newest), ()
        case RankFailed() if machine.phase in _ALIVE:
            return _failed(machine, event.failure)
        case NoResources() if machine.phase is Phase.LAUNCHING:
            finish = Finish(RunState.FAILED, event.reason, exit_code=4)
            return replace(machine, phase=Phase.ENDING, ending=finish, error=event.reason), (EndAttempt(),)
        case Reshape() if machine.ending is None and not machine.stop and not machine.reshaping:
            return _reshape(machine, event)
        case Finished(stopped=True) if machine.phase is Phase.RUNNING and _goes_on(machine):
            return replace(machine, phase=Phase.ENDING, state=RunState.RECOVERING, reshaping=True), (EndAttempt(),)
        case Finished() if machine.phase is Phase.RUNNING:
            finish = Finish(RunState.STOPPED if event.stopped else RunState.SUCCEEDED)
            return replace(machine, phase=Phase.ENDING, ending=finish), (EndAttempt(),)
        case AttemptGone() if machine.phase is Phase.ENDING:
            return _after(machine)
        case DelayOver() if machine.phase is Phase.WAITING:
            return replace(machine, phase=Phase.LAUNCHING, restarts=machine.restarts + 1), (Launch(),)
        case StopAsked():
            return _stop(machine, event.save)
        case _:
            return machine, ()


def _start(machine: Machine, event: Start) -> Step:
    machine = replace(
        machine,
        attempt=event.attempt,
        committed_step=event.committed_step,
        history=event.history,
        shape=event.shape,
    )
    if event.ending is not None:
        return _finish(machine, event.ending)
    if event.adopted:
        return replace(machine, phase=Phase.RUNNING, state=RunState.RUNNING, adopted=True), ()
    machine = replace(machine, phase=Phase.LAUNCHING)
    if event.interrupted:
        machine = replace(machine, state=RunState.RECOVERING, restarts=machine.restarts + 1)
    return machine, (Launch(),)


def _goes_on(machine: Machine) -> bool:
    """Whether ranks that stopped did so for the next attempt: the operator's wish is known to every life."""
    return not machine.stop and (machine.reshaping or machine.adopted)


def _reshape(machine: Machine, event: Reshape) -> Step:
    """Smaller: only while no rank sits, and at once. Larger: only when ranks train, after a save, and after progress.

    So every change but the first has a failure or newer commits before it, and changes come to an end.
    """
    smaller = event.shape.world < event.world
    if smaller and machine.phase is Phase.LAUNCHING:
        return replace(machine, phase=Phase.ENDING, shape=event.shape, reshaping=True), (EndAttempt(),)
    committed = machine.committed_step or 0
    progress = machine.grown_at is None or committed > machine.grown_at
    if event.shape.world > event.world and machine.phase is Phase.RUNNING and progress:
        machine = replace(machine, shape=event.shape, reshaping=True, grown_at=committed)
        return machine, (Ask(Requests(stop=True, save_before_stop=True)),)
    return machine, ()


def _failed(machine: Machine, failure: RankFailure) -> Step:
    if machine.ending is not None:
        return machine, ()
    failures = (*machine.failures, failure)
    state = RunState.STOPPING if machine.stop else RunState.RECOVERING
    machine = replace(machine, failures=failures, state=state, error=describe(root_cause(failures)))
    if machine.phase is Phase.ENDING:
        return machine, ()
    keep = not machine.stop and not machine.reshaping  # a process of one mesh cannot take part in another
    return replace(machine, phase=Phase.ENDING), (EndAttempt(keep),)


def _after(machine: Machine) -> Step:
    """The attempt is gone: what now?"""
    reshaping = machine.reshaping
    machine = replace(machine, reshaping=False)
    if machine.ending is not None:
        return _finish(machine, machine.ending)
    if machine.stop and not machine.failures:
        return _finish(machine, Finish(RunState.STOPPED))
    if reshaping and not machine.failures:
        return replace(machine, phase=Phase.LAUNCHING), (Launch(),)
    end = AttemptEnd(machine.attempt, machine.failures, machine.committed_step)
    machine = replace(machine, history=(*machine.history, end), failures=())
    if machine.stop:
        return _finish(machine, Finish(RunState.STOPPED, f"a rank failed before the last checkpoint: {machine.error}"))
    decision = machine.policy.decide(machine.history)
    if isinstance(decision, GiveUp):
        return _finish(machine, Finish(RunState.FAILED, decision.reason, decision.exit_code))
    return replace(machine, phase=Phase.WAITING, state=RunState.RECOVERING), (Wait(decision.delay_s),)


def _stop(machine: Machine, save: bool) -> Step:
    machine = replace(machine, stop=True, state=RunState.STOPPING)
    if machine.phase in (Phase.IDLE, Phase.WAITING):
        return _finish(machine, Finish(RunState.STOPPED))
    if machine.phase is Phase.ENDING:
        return machine, ()
    if machine.phase is Phase.RUNNING and save:
        return machine, (Ask(Requests(stop=True, save_before_stop=True)),)
    return replace(machine, phase=Phase.ENDING, ending=Finish(RunState.STOPPED)), (EndAttempt(),)


def _finish(machine: Machine, finish: Finish) -> Step:
    error = finish.reason or machine.error if finish.state is RunState.FAILED else machine.error
    return replace(machine, phase=Phase.DONE, state=finish.state, ending=finish, error=error), (finish,)
