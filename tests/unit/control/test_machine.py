"""The controller's state machine, for every order of events."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control import machine as m
from raypp.control.machine_log import MachineLog
from raypp.control.recovery.policies.default import DefaultPolicy
from raypp.control.recovery.policy import Policy
from raypp.failure_kinds import FailureKind
from raypp.planning.geometry import Shape
from raypp.records import RankFailure, Requests, RunState
from raypp.storage.directory import DirectoryStore


def failure(kind: str = "killed", step: int = 3) -> RankFailure:
    return RankFailure(1, "pp1", "10.0.0.1", 7, FailureKind(kind), "gone", step)


USUAL = DefaultPolicy()


def play(machine: m.Machine, *events: m.MachineEvent, policy: Policy = USUAL) -> tuple[m.Machine, list[m.Command]]:
    commands: list[m.Command] = []
    for event in events:
        machine, more = m.step(machine, event, policy)
        commands += more
    return machine, commands


RUNNING = (m.Start(), m.Claimed(1), m.Seated())


def test_a_run_that_meets_no_trouble_succeeds() -> None:
    machine, commands = play(m.Machine(), *RUNNING, m.Committed(10), m.Finished(False), m.AttemptEnded())
    assert machine.state is RunState.SUCCEEDED and machine.restarts == 0
    assert commands == [m.Launch(), m.EndAttempt(), m.Finish(RunState.SUCCEEDED)]


def test_a_failed_rank_ends_the_attempt_and_starts_the_next_once_nothing_of_it_is_left() -> None:
    machine, commands = play(m.Machine(), *RUNNING, m.RankFailed(failure()))
    assert machine.state is RunState.RECOVERING and commands[-1] == m.EndAttempt(keep=True)
    machine, commands = play(machine, m.RankFailed(failure("lost_peer")), m.AttemptEnded())
    assert commands == [m.Delay(0.0)] and [one.kind for one in machine.history[0].failures] == ["killed"]
    machine, commands = play(machine, m.DelayOver())
    assert commands == [m.Launch()] and machine.restarts == 1


def test_a_stop_with_a_save_is_handed_to_the_ranks_and_ends_as_stopped() -> None:
    machine, commands = play(m.Machine(), *RUNNING, m.StopAsked(True))
    assert machine.state is RunState.STOPPING and isinstance(commands[-1], m.SendRequests)
    machine, commands = play(machine, m.Finished(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED


UNSAVED = m.RankFailed(failure("save_failed", step=8))
FULL = m.RankFailed(failure("disk_full", step=8))
AGAIN = (m.AttemptEnded(), m.DelayOver(), m.Claimed(2), m.Seated())


def test_a_last_save_that_fails_starts_the_run_again_until_it_is_saved_or_its_restarts_are_used_up() -> None:
    for failed in (UNSAVED, FULL):
        machine, _ = play(m.Machine(), *RUNNING, m.Committed(5), failed, *AGAIN)
        assert (machine.state, machine.restarts) == (RunState.RUNNING, 1)
        saved, _ = play(machine, m.Committed(8), m.Finished(False, 8), m.AttemptEnded())
        assert saved.state is RunState.SUCCEEDED
        for _ in range(2):
            machine, _ = play(machine, failed, *AGAIN)
        machine, commands = play(machine, failed, m.AttemptEnded())
        assert machine.state is RunState.FAILED and machine.restarts == 3
        assert commands[-1] == m.Finish(RunState.FAILED, machine.error or "", 1)
        assert "3 restarts in a row brought no newer checkpoint" in (machine.error or "")


def test_a_stop_whose_save_fails_is_tried_again_and_ends_as_stopped_once_it_is_saved() -> None:
    stopping, _ = play(m.Machine(), *RUNNING, m.Committed(5), m.StopAsked(True))
    machine, commands = play(stopping, UNSAVED, m.AttemptEnded())
    assert (machine.phase, machine.state) == (m.RunPhase.WAITING, RunState.STOPPING)
    assert commands[-1] == m.Delay(0.0)
    assert play(machine, m.StopAsked(True))[0].phase is m.RunPhase.WAITING, "asked again, it is still tried"
    assert play(machine, m.StopAsked(False))[1] == [m.Finish(RunState.STOPPED)]
    machine, _ = play(machine, m.DelayOver(), m.Claimed(2), m.StopAsked(True), m.Seated())
    assert (machine.phase, machine.state) == (m.RunPhase.RUNNING, RunState.STOPPING)
    machine, commands = play(machine, m.Committed(7), m.Finished(True, 7), m.AttemptEnded())
    assert commands[-1] == m.Finish(RunState.STOPPED)


def test_a_stop_whose_save_never_succeeds_fails_the_run_and_names_the_newest_checkpoint() -> None:
    once = DefaultPolicy(1)
    machine, _ = play(m.Machine(), *RUNNING, m.Committed(5), m.StopAsked(True), UNSAVED, *AGAIN, policy=once)
    # An attempt that fails in another way is also one that did not save.
    for failed in (UNSAVED, m.RankFailed(failure("killed"))):
        _, commands = play(machine, failed, m.AttemptEnded(), policy=once)
        finish = commands[-1]
        assert isinstance(finish, m.Finish) and (finish.state, finish.exit_code) == (RunState.FAILED, 1)
        assert finish.reason.startswith("stopped without its last checkpoint (the newest is of step 5): rank 1 (pp1)")
    _, commands = play(m.Machine(), *RUNNING, m.StopAsked(True), UNSAVED, m.AttemptEnded(), policy=DefaultPolicy(0))
    assert "(there is none)" in commands[-1].reason  # type: ignore[union-attr]


def test_a_stop_whose_state_is_lost_with_its_ranks_has_failed() -> None:
    """Without snapshots in memory the next attempt has nothing to save."""
    machine, _ = play(m.Machine(), *RUNNING, m.Committed(5), m.StopAsked(True), UNSAVED, *AGAIN)
    machine, commands = play(machine, m.Finished(True, 5), m.AttemptEnded())
    assert machine.state is RunState.FAILED and "the state was in no memory" in commands[-1].reason  # type: ignore[union-attr]


def test_a_stop_while_a_failed_last_save_is_repeated_waits_for_it_and_is_sent_to_the_ranks() -> None:
    waiting, _ = play(m.Machine(), *RUNNING, m.Committed(5), UNSAVED, m.AttemptEnded())
    for before in ((), (m.DelayOver(),), (m.DelayOver(), m.Claimed(2))):
        machine, commands = play(waiting, *before, m.StopAsked(True))
        assert commands[-1] == m.SendRequests(Requests(stop=True, save_before_stop=True))
        assert machine.finish is None and machine.state is RunState.STOPPING
    machine, commands = play(m.Machine(), *RUNNING, UNSAVED, m.StopAsked(True), m.AttemptEnded())
    assert machine.phase is m.RunPhase.WAITING and m.SendRequests(m.Requests(stop=True)) in commands
    machine, _ = play(m.Machine(), *RUNNING, UNSAVED, m.StopAsked(False), m.AttemptEnded())
    assert machine.state is RunState.STOPPED


def test_a_stop_that_another_failure_robs_of_its_save_is_no_success() -> None:
    for save in (True, False):
        _, commands = play(m.Machine(), *RUNNING, m.RankFailed(failure()), m.StopAsked(save), m.AttemptEnded())
        finish = commands[-1]
        assert isinstance(finish, m.Finish) and (finish.state, finish.exit_code) == (RunState.STOPPED, int(save))


def test_what_comes_late_changes_neither_the_attempt_nor_the_newest_checkpoint() -> None:
    machine, commands = play(
        m.Machine(), *RUNNING, m.Committed(10), m.Committed(5), m.Claimed(7), m.NoResources("full")
    )
    assert (machine.attempt, machine.committed_step, machine.phase) == (1, 10, m.RunPhase.RUNNING)
    assert commands == [m.Launch()]


ALIVE = m.TakenOver(1, 10, alive=True)
GONE = m.TakenOver(1, 10, step=12)


def test_a_run_whose_ranks_are_gone_with_the_controller_is_started_again() -> None:
    running, _ = play(m.Machine(), *RUNNING)
    machine, commands = play(running, GONE)
    assert (machine.state, machine.restarts, commands) == (RunState.RECOVERING, 1, [m.Launch()])


def test_ranks_that_lived_on_are_led_on_and_no_restart_counts() -> None:
    for events in (RUNNING, RUNNING[:2], RUNNING[:1]):  # the newest of it may not have been written any more
        before, _ = play(m.Machine(), *events)
        machine, commands = play(before, ALIVE)
        assert (machine.state, machine.restarts, machine.attempt, commands) == (RunState.RUNNING, 0, 1, [])
    machine, commands = play(machine, m.RankFailed(failure()), m.AttemptEnded(), m.DelayOver())
    assert commands == [m.EndAttempt(keep=True), m.Delay(0.0), m.Launch()] and machine.restarts == 1


@pytest.mark.parametrize(
    ("events", "command"),
    [
        ((m.StopAsked(True),), m.SendRequests(Requests(stop=True, save_before_stop=True))),
        ((m.StopAsked(False),), m.EndAttempt(False)),
        ((m.RankFailed(failure()),), m.EndAttempt(True)),
        ((m.RankFailed(failure("user_error")),), m.EndAttempt(True)),
        ((m.Reshape(Shape(2, 4, 1, 1, 1, 1, 2), 4),), m.SendRequests(Requests(stop=True, save_before_stop=True))),
        ((m.Finished(False),), m.EndAttempt(False)),
    ],
)
def test_what_may_not_have_reached_the_ranks_is_sent_again(
    events: tuple[m.MachineEvent, ...], command: m.Command
) -> None:
    before, commands = play(m.Machine(), *RUNNING, *events)
    assert commands[-1] == command
    machine, again = play(before, ALIVE)
    assert (again, machine.phase) == ([command], before.phase)
    after = (m.AttemptEnded(),) if before.phase is m.RunPhase.ENDING else (m.Finished(True, 11), m.AttemptEnded())
    assert play(machine, *after)[1][-1] == play(before, m.Committed(10), *after)[1][-1]


def test_an_attempt_that_was_ending_has_ended_when_no_rank_is_left() -> None:
    for events in ((m.RankFailed(failure()),), (m.RankFailed(failure("user_error")),), (m.Finished(False),)):
        ending, _ = play(m.Machine(), *RUNNING, m.Committed(10), *events)
        assert play(ending, GONE) == play(ending, m.AttemptEnded())


def test_a_run_that_was_over_ends_the_same_way() -> None:
    over, commands = play(m.Machine(), *RUNNING, m.RankFailed(failure("user_error")), m.AttemptEnded())
    assert play(over, GONE) == (over, commands[-1:])


@pytest.mark.parametrize(
    ("stop", "newest", "step", "finish"),
    [
        (False, 20, 20, m.Finish(RunState.SUCCEEDED)),
        (True, 20, 20, m.Finish(RunState.SUCCEEDED)),
        (False, 10, 12, None),
        (True, 12, 12, m.Finish(RunState.STOPPED)),
        (True, 10, 12, m.Finish(RunState.STOPPED, "no rank was left to save the last checkpoint", 1)),
        (True, None, 12, m.Finish(RunState.STOPPED, "no rank was left to save the last checkpoint", 1)),
    ],
)
def test_a_stop_without_its_checkpoint_is_no_success(
    stop: bool, newest: int | None, step: int, finish: m.Finish | None
) -> None:
    running, _ = play(m.Machine(), *RUNNING, *[m.StopAsked(True)] * stop)
    _, commands = play(running, m.TakenOver(1, newest, complete=newest == 20, step=step))
    assert commands == [finish or m.Launch()]


def test_a_stop_whose_save_is_to_be_repeated_is_not_given_up_with_the_controller() -> None:
    waiting, _ = play(m.Machine(), *RUNNING, m.Committed(5), m.StopAsked(True), UNSAVED, m.AttemptEnded())
    machine, commands = play(waiting, GONE)
    assert (machine.state, machine.saving_again, commands) == (RunState.STOPPING, True, [m.Launch()])


def test_what_earlier_lives_of_the_controller_saw_fail_counts() -> None:
    twice = DefaultPolicy(2)
    machine, _ = play(m.Machine(), *RUNNING, m.Committed(10))
    for attempt in (1, 2):
        failed = (m.RankFailed(failure(step=attempt)), m.AttemptEnded(), m.DelayOver(), m.Claimed(attempt + 1))
        machine, _ = play(machine, *failed, m.Seated(), policy=twice)
        machine, _ = play(machine, m.TakenOver(attempt + 1, 10, alive=True), policy=twice)
    assert machine.restarts == 2
    machine, commands = play(machine, m.RankFailed(failure(step=9)), m.AttemptEnded(), policy=twice)
    assert machine.state is RunState.FAILED and "2 restarts in a row" in commands[-1].reason  # type: ignore[union-attr]


def test_a_restart_that_was_counted_is_not_counted_again() -> None:
    launching, _ = play(m.Machine(), *RUNNING, m.RankFailed(failure()), m.AttemptEnded(), m.DelayOver())
    assert launching.restarts == 1 and launching.attempt_is_over
    assert play(launching, m.TakenOver(1))[0].restarts == 1
    claimed, _ = play(launching, m.Claimed(2))
    assert not claimed.attempt_is_over and play(claimed, m.TakenOver(2))[0].restarts == 2


def test_processes_are_kept_only_where_another_attempt_may_follow() -> None:
    for events, keep in (
        ((m.RankFailed(failure()),), True),
        ((m.Finished(False),), False),
        ((m.StopAsked(False),), False),
        ((m.StopAsked(True), m.RankFailed(failure())), False),
    ):
        _, commands = play(m.Machine(), *RUNNING, *events)
        assert commands[-1] == m.EndAttempt(keep)


WHOLE, HALF = Shape(2, 2, 1, 1, 1, 1, 4), Shape(2, 1, 1, 1, 1, 1, 8)
GROWING = (m.Start(shape=HALF), m.Claimed(1), m.Seated(), m.Reshape(WHOLE, 2))


def test_without_room_the_run_takes_a_smaller_mesh_with_new_processes_and_counts_no_restart() -> None:
    launching, _ = play(m.Machine(), *RUNNING, m.RankFailed(failure()), m.AttemptEnded(), m.DelayOver())
    machine, commands = play(launching, m.Claimed(2), m.Reshape(HALF, 4), m.AttemptEnded())
    assert commands == [m.EndAttempt(), m.Launch()]
    assert (machine.shape, machine.restarts, len(machine.history)) == (HALF, 1, 1)


def test_with_room_again_the_run_saves_stops_and_takes_the_larger_mesh() -> None:
    machine, commands = play(m.Machine(), *GROWING)
    assert commands[-1] == m.SendRequests(Requests(stop=True, save_before_stop=True))
    machine, commands = play(machine, m.Committed(7), m.Finished(True), m.AttemptEnded())
    assert commands == [m.EndAttempt(), m.Launch()]
    assert (machine.shape, machine.restarts, machine.history) == (WHOLE, 0, ())


def test_a_run_does_not_grow_twice_without_a_newer_commit() -> None:
    machine, _ = play(m.Machine(), m.Start(committed_step=7, shape=HALF), m.Claimed(1), m.Seated())
    machine, _ = play(machine, m.Reshape(WHOLE, 2), m.Finished(True), m.AttemptEnded())
    machine, _ = play(machine, m.Claimed(2), m.Reshape(HALF, 4), m.AttemptEnded(), m.Claimed(3), m.Seated())
    assert machine.shape == HALF
    assert play(machine, m.Reshape(WHOLE, 2))[1] == []
    assert play(machine, m.Committed(8), m.Reshape(WHOLE, 2))[1] != []


SHRINKING = (m.Start(), m.Claimed(1), m.Reshape(HALF, 4))
DIED = m.RankFailed(failure())
STOPPED = m.Finish(RunState.STOPPED)


@pytest.mark.parametrize(
    ("events", "finish"),
    [
        pytest.param((*RUNNING, m.StopAsked(True), DIED), None, id="a rank dies while the run stops"),
        pytest.param((m.Start(), m.Claimed(1), m.StopAsked(True)), STOPPED, id="a stop before there are seats"),
        pytest.param(
            (m.Start(), m.Claimed(1), m.NoResources("too small")), m.Finish(RunState.FAILED, "too small", 4),
            id="the cluster cannot hold the mesh",
        ),
        pytest.param(
            (*GROWING, m.StopAsked(True), m.Finished(True, 7), DIED), STOPPED, id="a stop before growth, then a failure"
        ),
        pytest.param((*GROWING, m.StopAsked(), m.Finished(True)), STOPPED, id="a stop wins over growth"),
        pytest.param((*SHRINKING, m.StopAsked()), STOPPED, id="a stop wins over shrinking"),
        pytest.param((*GROWING, m.Finished(False)), m.Finish(RunState.SUCCEEDED), id="it finishes before it grows"),
    ],
)  # fmt: skip
def test_what_ends_a_run_starts_no_other_attempt(events: tuple[m.MachineEvent, ...], finish: m.Finish | None) -> None:
    machine, commands = play(m.Machine(), *events, m.AttemptEnded())
    assert machine.state is (finish or STOPPED).state and finish in (None, commands[-1])
    assert m.Launch() not in commands[1:]


def test_a_failure_while_the_run_was_to_grow_keeps_no_process() -> None:
    assert play(m.Machine(), *GROWING, m.RankFailed(failure()))[1][-1] == m.EndAttempt(keep=False)


def test_a_run_that_cannot_save_before_it_grows_keeps_its_mesh_which_its_snapshots_fit() -> None:
    machine, commands = play(m.Machine(), *GROWING, UNSAVED, m.AttemptEnded(), m.DelayOver(), m.Claimed(2), m.Seated())
    assert (machine.shape, machine.restarts, machine.state) == (HALF, 1, RunState.RUNNING)
    assert play(machine, m.Reshape(WHOLE, 2))[1] == [], "not before there is a newer commit"
    machine, commands = play(machine, m.Committed(9), m.Reshape(WHOLE, 2), m.Finished(True), m.AttemptEnded())
    assert (machine.shape, commands[-1]) == (WHOLE, m.Launch())
    killed, _ = play(m.Machine(), *GROWING, m.RankFailed(failure()), m.AttemptEnded())
    assert killed.shape == WHOLE


GIVING = (*RUNNING, m.RoomAsked(None))
WAITING_AGAIN = (*GIVING, m.Committed(7), m.Finished(True), m.AttemptEnded())


def test_a_run_that_gives_way_saves_waits_and_goes_on_when_its_turn_comes_and_counts_no_restart() -> None:
    machine, commands = play(m.Machine(), *WAITING_AGAIN, m.DelayOver(), m.RoomAsked(HALF))
    save = m.SendRequests(Requests(stop=True, save_before_stop=True))
    assert commands[1:] == [save, m.EndAttempt(), m.JoinLine()] and machine.state is RunState.PENDING
    assert play(machine, m.TakenOver(1, 7))[1] == [m.JoinLine()], "another controller process lets it wait, too"
    machine, commands = play(machine, m.TurnCame(), m.TurnCame(), m.Claimed(2), m.Seated())
    assert commands == [m.Launch()] and (machine.state, machine.restarts, machine.history) == (RunState.RUNNING, 0, ())


def test_a_run_shrinks_for_the_line_and_keeps_its_mesh_if_it_cannot_save() -> None:
    shrinking = (m.Start(shape=WHOLE), m.Claimed(1), m.Seated(), m.RoomAsked(HALF), m.RoomAsked(None))
    machine, commands = play(m.Machine(), *shrinking, m.Finished(True), m.AttemptEnded())
    assert (machine.shape, commands[-1], machine.restarts) == (HALF, m.Launch(), 0)
    unsaved, _ = play(m.Machine(), *shrinking, UNSAVED, m.AttemptEnded(), m.DelayOver())
    assert (unsaved.shape, unsaved.restarts, unsaved.gives_way) == (WHOLE, 1, False)


def test_a_stop_ends_a_run_that_gives_way_or_waits_after_that() -> None:
    for events in ((*GIVING, m.StopAsked(True), m.Finished(True), m.AttemptEnded()), (*WAITING_AGAIN, m.StopAsked())):
        machine, commands = play(m.Machine(), *events)
        assert machine.state is RunState.STOPPED and commands[-1] == m.Finish(RunState.STOPPED)
    failed, _ = play(m.Machine(), *GIVING, m.RankFailed(failure()), m.AttemptEnded())
    assert (failed.state, failed.gives_way) == (RunState.RECOVERING, False), "it keeps its devices"


_SHAPES = st.sampled_from([WHOLE, HALF, Shape(1, 1, 1, 1, 1, 1, 8)])
_FAILURES = ["killed", "raised", "lost_peer", "save_failed"]
_EVENTS = st.one_of(
    st.builds(m.Reshape, _SHAPES, st.sampled_from([1, 2, 4])),
    st.just(m.Start()),
    st.builds(m.RoomAsked, st.one_of(st.none(), _SHAPES)),
    st.just(m.TurnCame()),
    st.builds(m.TakenOver, st.integers(1, 9), st.integers(0, 50), alive=st.booleans(), complete=st.booleans()),
    st.builds(m.Claimed, st.integers(1, 9)),
    st.just(m.Seated()),
    st.builds(m.Committed, st.integers(1, 50)),
    st.builds(m.RankFailed, st.builds(failure, st.sampled_from(_FAILURES), st.integers(0, 3))),
    st.just(m.NoResources("too small")),
    st.builds(m.Finished, st.booleans(), st.integers(0, 50)),
    st.just(m.AttemptEnded()),
    st.just(m.DelayOver()),
    st.builds(m.StopAsked, st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_EVENTS, max_size=60), st.integers(0, 3))
def test_whatever_happens_two_attempts_never_live_and_nothing_starts_after_the_end(
    events: list[m.MachineEvent], max_restarts: int
) -> None:
    machine = m.Machine()
    alive = finished = False
    for event in events:
        before = machine
        if isinstance(event, m.AttemptEnded):
            if before.phase is not m.RunPhase.ENDING:
                continue  # what carries out commands says so only after EndAttempt
            alive = False
        if isinstance(event, m.TakenOver):
            if before.phase in (m.RunPhase.IDLE, m.RunPhase.DONE):
                continue  # nothing was written, or it is over
            alive = alive and event.alive and not before.attempt_is_over
            event = replace(event, alive=alive, attempt=before.attempt)
        machine, commands = m.step(machine, event, DefaultPolicy(max_restarts))
        for command in commands:
            assert not finished, "a command after the end"
            if isinstance(command, m.Launch):
                assert not alive, "two attempts alive"
                alive = True
            if isinstance(command, m.EndAttempt):
                assert alive
                assert not (command.keep and machine.finish), "processes kept for an attempt that never comes"
            if isinstance(command, m.Finish):
                assert not alive, "the run ended with a living attempt"
                finished = True
        assert finished == (machine.phase is m.RunPhase.DONE) == machine.state.final
        assert alive == (machine.phase in (m.RunPhase.LAUNCHING, m.RunPhase.RUNNING, m.RunPhase.ENDING))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["killed", "raised", "lost_peer"]), st.booleans()), max_size=40),
    st.integers(0, 4),
)
def test_a_run_whose_attempts_all_fail_ends_and_never_restarts_in_vain_more_often_than_allowed(
    attempts: list[tuple[str, bool]], max_restarts: int
) -> None:
    machine, _ = play(m.Machine(), m.Start())
    policy = DefaultPolicy(max_restarts)
    step = in_vain = 0
    for kind, progress in [*attempts, *[("killed", False)] * (max_restarts + 2)]:
        machine, _ = play(machine, m.Claimed(machine.attempt + 1), m.Seated())
        if progress:
            step += 1
            machine, _ = play(machine, m.Committed(step))
        # Different steps: the rule against the same exception twice must not end it sooner.
        machine, _ = play(machine, m.RankFailed(failure(kind, machine.attempt)), m.AttemptEnded(), policy=policy)
        first = len(machine.history) == 1
        in_vain = 0 if first or progress else in_vain + 1
        if machine.phase is m.RunPhase.DONE:
            break
        assert in_vain < max(max_restarts, 1)
        machine, _ = play(machine, m.DelayOver())
    assert machine.state is RunState.FAILED
    assert in_vain == max_restarts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40), st.integers(0, 30))
def test_changes_of_mesh_come_to_an_end_however_nodes_come_and_go(rounds: list[tuple[bool, bool]], steps: int) -> None:
    """An attempt finds no room and shrinks, or trains, may take a step, and is offered room."""
    shapes = [Shape(1, 1, 1, 1, 1, 1, 8), HALF, WHOLE]
    machine, _ = play(m.Machine(), m.Start(shape=WHOLE))
    launches, step = 1, 0
    for no_room, takes_a_step in [*rounds, *[(False, False)] * 10, *[(True, False)] * 10]:
        assert machine.shape is not None
        at = shapes.index(machine.shape)
        machine, _ = play(machine, m.Claimed(launches))
        if no_room and at > 0:
            machine, commands = play(machine, m.Reshape(shapes[at - 1], machine.shape.world), m.AttemptEnded())
            launches += commands.count(m.Launch())
            continue
        machine, _ = play(machine, m.Seated())
        if takes_a_step and step < steps:
            step += 1
            machine, _ = play(machine, m.Committed(step))
        machine, commands = play(machine, m.Reshape(WHOLE, machine.shape.world), m.Finished(True))
        if m.EndAttempt() not in commands or machine.finish is not None:
            break
        machine, commands = play(machine, m.AttemptEnded())
        launches += commands.count(m.Launch())
    grown = step + 2
    assert launches <= 1 + grown + 2 * (grown + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(_EVENTS, max_size=40), st.text(max_size=20))
def test_a_machine_is_read_as_it_was_written(events: list[m.MachineEvent], cause: str) -> None:
    torn = m.RankFailed(replace(failure(), cause=cause, details="is left out"))
    machine, _ = play(m.Machine(), m.Start(shape=WHOLE, device="cuda"), m.Claimed(1), torn, *events)
    with TemporaryDirectory() as folder:
        log = MachineLog(DirectoryStore(Path(folder)), "r", "c-1")
        assert log.open(1) is None
        log.put(machine)
        log.write()
        assert MachineLog(DirectoryStore(Path(folder)), "r", "c-2").open(1) == machine
