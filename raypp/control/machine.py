"""The state machine of a run, pure: `step(machine, event) -> (machine, commands)`.

It decides; `leader.py` carries out. Whatever the order of events, at most one attempt is alive,
nothing starts after the end, and every run ends. The machine is plain data that `machine_log.py`
keeps in the store, so that the next controller process goes on from it (`TakenOver`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from raypp.control.recovery.policies.default import DefaultPolicy
from raypp.control.recovery.policy import AttemptEnd, GiveUp, Policy, describe, root_cause
from raypp.planning.geometry import Shape
from raypp.records import RankFailure, Requests, RunState
from raypp.untrusted.documents import Count


class RunPhase(StrEnum):
    """What the run does, as decided here.

    The progress of one attempt is `attempt.AttemptPhase`: a run is LAUNCHING while its attempt is
    PLACING or STARTING, ENDING until the attempt has ENDED, and while WAITING it has none.
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
        phase: What the run does; an attempt is alive in LAUNCHING, RUNNING and ENDING.
        restarts: Attempts started because one failed.
        committed_step: Newest commit known.
        stop: The operator wants the run to end.
        saves: And to save before.
        saving_again: The save before the stop failed; attempts are started only to repeat it.
        history: How attempts failed, oldest first.
        failures: Of the current attempt, without their details; of those that only lost a peer at
            most the first.
        finish: How the run ends after the current attempt, when that is decided already.
        error: The last failure, as text.
        shape: The mesh of the current or next attempt; None: that of the job.
        reshaping: The current attempt ends, or is asked to, so that the next has another mesh.
        grown_at: Newest commit when the mesh last grew.
        reshapes_from: The mesh of the attempt that is to save and end for another.
        gives_way: That attempt is to end, or has ended, for a run of higher priority; the next
            begins when the run has its turn in the line again.
        device: What the ranks run on, cpu or cuda; chosen once.
        unfit: Addresses of nodes that failed a test between attempts, each with the error.
    """

    state: RunState = RunState.PENDING
    phase: RunPhase = RunPhase.IDLE
    attempt: Count = 0
    restarts: Count = 0
    committed_step: Count | None = None
    stop: bool = False
    saves: bool = False
    saving_again: bool = False
    history: tuple[AttemptEnd, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    finish: Finish | None = None
    error: str | None = None
    shape: Shape | None = None
    reshaping: bool = False
    grown_at: Count | None = None
    reshapes_from: Shape | None = None
    gives_way: bool = False
    device: str = ""
    unfit: tuple[tuple[str, str], ...] = ()

    @property
    def training(self) -> bool:
        return self.phase is RunPhase.RUNNING

    @property
    def attempt_is_over(self) -> bool:
        """Whether the current attempt has failed, and all that is left of it are processes."""
        return bool(self.history) and self.history[-1].attempt == self.attempt


# Events -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The run was submitted. `attempt`: number of its last attempt, of earlier submissions."""

    attempt: int = 0
    committed_step: int | None = None
    shape: Shape | None = None
    device: str = ""


@dataclass(frozen=True)
class TakenOver:
    """The controller was killed, and another process has read its machine. `attempt`: the last
    claimed. `alive`: ranks of it are left. `step`: the last that is known to be done."""

    attempt: int
    committed_step: int | None = None
    alive: bool = False
    complete: bool = False
    step: int = 0


@dataclass(frozen=True)
class Claimed:
    """The attempt has claimed this number in the store."""

    attempt: int


@dataclass(frozen=True)
class Seated:
    """Every rank has its seat and is running."""


@dataclass(frozen=True)
class NodesFailed:
    """Nodes failed a test between two attempts, each with the error."""

    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Committed:
    """A checkpoint exists."""

    step: int


@dataclass(frozen=True)
class RankFailed:
    """A rank failed, while it ran or while it was launched."""

    failure: RankFailure


@dataclass(frozen=True)
class NoResources:
    """The cluster cannot hold the mesh."""

    reason: str


@dataclass(frozen=True)
class Reshape:
    """Another mesh is better: a smaller one for which there is room, or a larger one again."""

    shape: Shape
    world: int
    """Ranks of the current mesh."""


@dataclass(frozen=True)
class RoomAsked:
    """A run of higher priority, the first of the line, needs devices of this one. `shape`: the
    smaller mesh to go on with; None: the run is to wait in the line."""

    shape: Shape | None = None
    why: str = ""


@dataclass(frozen=True)
class TurnCame:
    """The run, which gave way, has its turn in the line."""


@dataclass(frozen=True)
class Finished:
    """Every rank returned normally."""

    stopped: bool
    step: int | None = None
    """The last step that is done; None: not known."""


@dataclass(frozen=True)
class AttemptEnded:
    """No process takes part in the attempt any more."""


@dataclass(frozen=True)
class DelayOver:
    """The pause before the next attempt is over."""


@dataclass(frozen=True)
class StopAsked:
    """The operator wants the run to end."""

    save: bool = True


MachineEvent: TypeAlias = (
    Start
    | TakenOver
    | Claimed
    | Seated
    | NodesFailed
    | Committed
    | RankFailed
    | NoResources
    | Reshape
    | RoomAsked
    | TurnCame
    | Finished
    | AttemptEnded
    | DelayOver
    | StopAsked
)

# Commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start an attempt: claim a number, place, seat."""


@dataclass(frozen=True)
class EndAttempt:
    """End the attempt in every process; `AttemptEnded` follows."""

    keep: bool = False
    """Processes that can take part in another attempt are kept."""


@dataclass(frozen=True)
class SendRequests:
    """Send the ranks a request."""

    requests: Requests


@dataclass(frozen=True)
class Delay:
    """Send `DelayOver` after this many seconds."""

    seconds: float


@dataclass(frozen=True)
class JoinLine:
    """Give the devices back, and wait in the line; `TurnCame` follows."""


@dataclass(frozen=True)
class Finish:
    """End the run. `exit_code` is that of the command that follows it."""

    state: RunState
    reason: str = ""
    exit_code: int = 0


Command: TypeAlias = Launch | EndAttempt | SendRequests | Delay | JoinLine | Finish
Step: TypeAlias = tuple[Machine, tuple[Command, ...]]

_SAVE_AND_STOP = SendRequests(Requests(stop=True, save_before_stop=True))
_ALIVE = (RunPhase.LAUNCHING, RunPhase.RUNNING, RunPhase.ENDING)
_DEFAULT = DefaultPolicy()


def step(machine: Machine, event: MachineEvent, policy: Policy = _DEFAULT) -> Step:
    """Returns the state and the commands that follow from an event. Events that come too late
    change nothing. `policy`: decides whether the run continues after an attempt failed."""
    if isinstance(event, TakenOver):
        return _take_over(machine, event, policy)
    if machine.phase is RunPhase.DONE:
        return machine, ()
    match event:
        case Start() if machine.phase is RunPhase.IDLE:
            started = replace(machine, phase=RunPhase.LAUNCHING, attempt=event.attempt, device=event.device)
            return replace(started, committed_step=event.committed_step, shape=event.shape), (Launch(),)
        case Claimed() if machine.phase is RunPhase.LAUNCHING:
            return replace(machine, attempt=event.attempt), ()
        case Seated() if machine.phase is RunPhase.LAUNCHING:
            state = RunState.STOPPING if machine.stop else RunState.RUNNING
            return replace(machine, phase=RunPhase.RUNNING, state=state), ()
        case NodesFailed():
            return replace(machine, unfit=tuple((dict(machine.unfit) | dict(event.nodes)).items())), ()
        case Committed():
            newest = event.step if machine.committed_step is None else max(machine.committed_step, event.step)
            return replace(machine, committed_step=newest), ()
        case RankFailed() if machine.phase in _ALIVE:
            return _failed(machine, event.failure)
        case NoResources() if machine.phase is RunPhase.LAUNCHING:
            finish = Finish(RunState.FAILED, event.reason, exit_code=4)
            return replace(machine, phase=RunPhase.ENDING, finish=finish, error=event.reason), (EndAttempt(),)
        case Reshape() if machine.finish is None and not machine.stop and not machine.reshaping:
            return _reshape(machine, event)
        case RoomAsked() if machine.phase is RunPhase.RUNNING and not machine.stop and not machine.reshaping:
            machine = replace(machine, reshaping=True, reshapes_from=machine.shape, gives_way=event.shape is None)
            return replace(machine, shape=event.shape or machine.shape), (_SAVE_AND_STOP,)
        case TurnCame() if machine.phase is RunPhase.WAITING and machine.gives_way:
            return replace(machine, phase=RunPhase.LAUNCHING, gives_way=False), (Launch(),)
        case Finished(stopped=True) if machine.phase is RunPhase.RUNNING and machine.reshaping and not machine.stop:
            return replace(machine, phase=RunPhase.ENDING, state=RunState.RECOVERING), (EndAttempt(),)
        case Finished() if machine.phase is RunPhase.RUNNING:
            return replace(machine, phase=RunPhase.ENDING, finish=_end_of_work(machine, event)), (EndAttempt(),)
        case AttemptEnded() if machine.phase is RunPhase.ENDING:
            return _after_attempt(machine, policy)
        case DelayOver() if machine.phase is RunPhase.WAITING and not machine.gives_way:
            return replace(machine, phase=RunPhase.LAUNCHING, restarts=machine.restarts + 1), (Launch(),)
        case StopAsked():
            return _stop(machine, event.save)
        case _:
            return machine, ()


def _take_over(machine: Machine, event: TakenOver, policy: Policy) -> Step:
    """Goes on from the machine of a killed process. What it had not written any more is less than a
    second old, or happens again: ranks that failed are found to have failed."""
    if machine.finish is not None and machine.phase is RunPhase.DONE:
        return machine, (machine.finish,)
    if machine.attempt != event.attempt:  # no more was written of it than that it was to start
        machine = replace(machine, attempt=event.attempt, phase=RunPhase.LAUNCHING)
    machine = replace(machine, committed_step=event.committed_step)
    if event.alive:
        return _lead_on(machine)
    if machine.finish is not None:
        return _finish(machine, machine.finish)
    if event.complete:
        return _finish(machine, Finish(RunState.SUCCEEDED))
    if machine.phase is RunPhase.ENDING:
        return _after_attempt(machine, policy)
    if machine.phase is RunPhase.WAITING and machine.gives_way:
        return machine, (JoinLine(),)
    before_ranks = machine.phase in (RunPhase.WAITING, RunPhase.LAUNCHING)
    if machine.stop and not (machine.saving_again and before_ranks):
        if (machine.committed_step or 0) >= event.step:
            return _finish(machine, Finish(RunState.STOPPED))
        reason = "no rank was left to save the last checkpoint"
        return _finish(machine, Finish(RunState.STOPPED, reason, exit_code=1))
    counted = machine.phase is RunPhase.LAUNCHING and machine.attempt_is_over
    restarts = machine.restarts if counted else machine.restarts + 1
    state = RunState.STOPPING if machine.stop else RunState.RECOVERING
    machine = replace(machine, reshaping=False, reshapes_from=None, gives_way=False)
    return replace(machine, phase=RunPhase.LAUNCHING, state=state, restarts=restarts), (Launch(),)


def _lead_on(machine: Machine) -> Step:
    """Repeats what the killed process may not have told the ranks any more."""
    if machine.phase is RunPhase.ENDING:
        return machine, (EndAttempt(_keeps_processes(machine)),)
    state = RunState.STOPPING if machine.stop else RunState.RUNNING
    machine = replace(machine, phase=RunPhase.RUNNING, state=state)
    return machine, (_SAVE_AND_STOP,) if machine.stop or machine.reshaping else ()


def _keeps_processes(machine: Machine) -> bool:
    """Returns whether another attempt may follow on the same mesh, which reuses processes."""
    return machine.finish is None and not machine.stop and not machine.reshaping


def _end_of_work(machine: Machine, event: Finished) -> Finish:
    """Returns how a run ends whose ranks returned normally.

    An attempt started to save before a stop has failed if it found no newer state than committed.
    """
    if not event.stopped:
        return Finish(RunState.SUCCEEDED)
    if machine.saving_again and event.step is not None and event.step <= (machine.history[-1].committed_step or 0):
        return _without_its_save(machine, f"{machine.error}; the state was in no memory any more")
    return Finish(RunState.STOPPED)


def _without_its_save(machine: Machine, reason: str, exit_code: int = 1) -> Finish:
    """Returns the end of a run that was to save before it stopped, and could not."""
    newest = "there is none" if machine.committed_step is None else f"the newest is of step {machine.committed_step}"
    return Finish(RunState.FAILED, f"stopped without its last checkpoint ({newest}): {reason}", exit_code)


def _reshape(machine: Machine, event: Reshape) -> Step:
    """Shrinks at once, and only before ranks have seats; grows only when ranks train, after a save
    and after progress.

    So every change but the first follows a failure or newer commits, and the changes end.
    """
    smaller = event.shape.world < event.world
    if smaller and machine.phase is RunPhase.LAUNCHING:
        return replace(machine, phase=RunPhase.ENDING, shape=event.shape, reshaping=True), (EndAttempt(),)
    committed = machine.committed_step or 0
    progress = machine.grown_at is None or committed > machine.grown_at
    if event.shape.world > event.world and machine.phase is RunPhase.RUNNING and progress:
        machine = replace(machine, shape=event.shape, reshaping=True, grown_at=committed, reshapes_from=machine.shape)
        return machine, (_SAVE_AND_STOP,)
    return machine, ()


def _failed(machine: Machine, failure: RankFailure) -> Step:
    if machine.finish is not None:
        return machine, ()
    failures = machine.failures
    if not (failures and failure.kind.traits.witness):
        failures = (*failures, replace(failure, details=""))
    state = RunState.STOPPING if machine.stop else RunState.RECOVERING
    machine = replace(machine, failures=failures, state=state, error=describe(root_cause(failures)))
    if machine.phase is RunPhase.ENDING:
        return machine, ()
    return replace(machine, phase=RunPhase.ENDING), (EndAttempt(_keeps_processes(machine)),)


def _after_attempt(machine: Machine, policy: Policy) -> Step:
    """Decides what follows when the attempt has ended."""
    reshaping, before, gives_way = machine.reshaping, machine.reshapes_from, machine.gives_way
    machine = replace(machine, reshaping=False, reshapes_from=None, gives_way=False)
    if machine.finish is not None:
        return _finish(machine, machine.finish)
    if machine.stop and not machine.failures:
        return _finish(machine, Finish(RunState.STOPPED))
    if gives_way and not machine.failures:
        return replace(machine, phase=RunPhase.WAITING, state=RunState.PENDING, gives_way=True), (JoinLine(),)
    if reshaping and not machine.failures:
        return replace(machine, phase=RunPhase.LAUNCHING), (Launch(),)
    end = AttemptEnd(machine.attempt, machine.failures, machine.committed_step)
    machine = replace(machine, history=(*machine.history, end), failures=())
    if before is not None and save_may_help(machine):
        machine = replace(machine, shape=before)  # another mesh cannot use the snapshots in memory
    if machine.stop and not (machine.saves and (machine.saving_again or save_may_help(machine))):
        reason = f"a rank failed before the last checkpoint: {machine.error}"
        return _finish(machine, Finish(RunState.STOPPED, reason, exit_code=int(machine.saves)))
    decision = policy.decide(machine.history)
    if isinstance(decision, GiveUp):
        finish = Finish(RunState.FAILED, decision.reason, decision.exit_code)
        if machine.stop:
            finish = _without_its_save(machine, decision.reason, decision.exit_code)
        return _finish(machine, finish)
    state = RunState.STOPPING if machine.stop else RunState.RECOVERING
    machine = replace(machine, phase=RunPhase.WAITING, state=state, saving_again=machine.stop)
    return machine, (Delay(decision.delay_s),)


def save_may_help(machine: Machine) -> bool:
    """Returns whether the last attempt failed in a way that may leave its state in memory only."""
    return bool(machine.history) and root_cause(machine.history[-1].failures).kind.traits.save_again


def _stop(machine: Machine, save: bool) -> Step:
    in_line = machine.phase is RunPhase.WAITING and machine.gives_way  # so it has saved
    machine = replace(machine, stop=True, saves=save, state=RunState.STOPPING)
    if not in_line and save and machine.phase in (RunPhase.WAITING, RunPhase.LAUNCHING) and save_may_help(machine):
        return replace(machine, saving_again=True), (_SAVE_AND_STOP,)
    if machine.phase in (RunPhase.IDLE, RunPhase.WAITING):
        return _finish(machine, Finish(RunState.STOPPED))
    if machine.phase is RunPhase.ENDING:
        return machine, (_SAVE_AND_STOP,) if save else ()
    if machine.phase is RunPhase.RUNNING and save:
        return machine, (_SAVE_AND_STOP,)
    return replace(machine, phase=RunPhase.ENDING, finish=Finish(RunState.STOPPED)), (EndAttempt(),)


def _finish(machine: Machine, finish: Finish) -> Step:
    return finished(machine, finish), (finish,)


def finished(machine: Machine, finish: Finish) -> Machine:
    """Returns the machine of a run that has ended."""
    error = finish.reason or machine.error if finish.state is RunState.FAILED else machine.error
    return replace(machine, phase=RunPhase.DONE, state=finish.state, finish=finish, error=error)
