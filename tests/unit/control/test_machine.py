"""The controller's state machine, for every order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control import machine as m
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure, Requests, RunState
from raypp.recovery.elastic_shape import Shape
from raypp.recovery.policies.default import DefaultPolicy
from raypp.recovery.policy import AttemptEnd


def failure(kind: str = "killed", step: int = 3) -> RankFailure:
    return RankFailure(1, "pp1", "10.0.0.1", 7, FailureKind(kind), "gone", step)


def play(machine: m.Machine, *events: m.MachineEvent) -> tuple[m.Machine, list[m.Command]]:
    commands: list[m.Command] = []
    for event in events:
        machine, more = m.step(machine, event)
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
    assert commands == [m.Delay(0.0)] and len(machine.history[0].failures) == 2
    machine, commands = play(machine, m.DelayOver())
    assert commands == [m.Launch()] and machine.restarts == 1


def test_a_stop_with_a_save_is_handed_to_the_ranks_and_ends_as_stopped() -> None:
    machine, commands = play(m.Machine(), *RUNNING, m.StopAsked(True))
    assert machine.state is RunState.STOPPING and isinstance(commands[-1], m.SendRequests)
    machine, commands = play(machine, m.Finished(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED


def test_ranks_that_an_earlier_life_asked_to_stop_go_on_unless_the_operator_wants_the_end() -> None:
    adopted = m.Start(3, 10, adopted=True)
    machine, commands = play(m.Machine(), adopted, m.Finished(True), m.AttemptEnded())
    assert (machine.phase, machine.restarts, commands[-1]) == (m.RunPhase.LAUNCHING, 0, m.Launch())
    machine, _ = play(machine, m.Claimed(4), m.Seated(), m.Finished(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED
    machine, _ = play(m.Machine(), adopted, m.StopAsked(True), m.Finished(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED


def test_a_run_that_is_over_when_it_is_found_keeps_its_attempt_and_its_checkpoint() -> None:
    finish = m.Finish(RunState.FAILED, "the sun is too bright", 2)
    machine, commands = play(m.Machine(), m.Start(3, 10, interrupted=True, finish=finish))
    assert commands == [finish] and machine.phase is m.RunPhase.DONE
    assert (machine.attempt, machine.committed_step, machine.restarts) == (3, 10, 0)
    assert (machine.state, machine.error) == (RunState.FAILED, "the sun is too bright")


def test_a_rank_that_dies_while_the_run_stops_does_not_start_it_again() -> None:
    machine, commands = play(m.Machine(), *RUNNING, m.StopAsked(True), m.RankFailed(failure()), m.AttemptEnded())
    assert machine.state is RunState.STOPPED and m.Launch() not in commands[1:]


def test_a_stop_before_the_ranks_are_seated_ends_the_run() -> None:
    machine, commands = play(m.Machine(), m.Start(), m.Claimed(1), m.StopAsked(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED and commands[-1] == m.Finish(RunState.STOPPED)


def test_a_mesh_the_cluster_cannot_hold_fails_the_run_with_the_exit_code_of_missing_resources() -> None:
    machine, commands = play(m.Machine(), m.Start(), m.Claimed(1), m.NoResources("too small"), m.AttemptEnded())
    assert machine.state is RunState.FAILED
    assert commands[-1] == m.Finish(RunState.FAILED, "too small", 4)


def test_a_later_life_of_the_controller_counts_as_a_restart() -> None:
    machine, commands = play(m.Machine(), m.Start(attempt=2, committed_step=20, interrupted=True))
    assert (machine.state, machine.restarts, commands) == (RunState.RECOVERING, 1, [m.Launch()])


def test_a_later_life_that_finds_its_ranks_alive_leads_them_on_and_counts_no_restart() -> None:
    machine, commands = play(m.Machine(), m.Start(attempt=2, committed_step=20, adopted=True))
    assert (machine.state, machine.restarts, machine.attempt, commands) == (RunState.RUNNING, 0, 2, [])
    machine, commands = play(machine, m.RankFailed(failure()), m.AttemptEnded(), m.DelayOver())
    assert commands == [m.EndAttempt(keep=True), m.Delay(0.0), m.Launch()] and machine.restarts == 1


def test_what_earlier_lives_of_the_controller_saw_fail_counts() -> None:
    history = tuple(AttemptEnd(attempt, (failure(),), 10) for attempt in (1, 2))
    machine, _ = play(m.Machine(policy=DefaultPolicy(2)), m.Start(3, 10, adopted=True, history=history))
    machine, commands = play(machine, m.RankFailed(failure()), m.AttemptEnded())
    assert machine.state is RunState.FAILED and "2 restarts in a row" in commands[-1].reason  # type: ignore[union-attr]


def test_processes_are_kept_only_where_another_attempt_may_follow() -> None:
    for events, keep in (
        ((m.RankFailed(failure()),), True),
        ((m.Finished(False),), False),
        ((m.StopAsked(False),), False),
        ((m.StopAsked(True), m.RankFailed(failure())), False),
    ):
        _, commands = play(m.Machine(), *RUNNING, *events)
        assert commands[-1] == m.EndAttempt(keep)


WHOLE, HALF = Shape(2, 2, 1, 1, 1, 4), Shape(2, 1, 1, 1, 1, 8)


def test_without_room_the_run_takes_a_smaller_mesh_with_new_processes_and_counts_no_restart() -> None:
    launching, _ = play(m.Machine(), *RUNNING, m.RankFailed(failure()), m.AttemptEnded(), m.DelayOver())
    machine, commands = play(launching, m.Claimed(2), m.Reshape(HALF, 4), m.AttemptEnded())
    assert commands == [m.EndAttempt(), m.Launch()]
    assert (machine.shape, machine.restarts, len(machine.history)) == (HALF, 1, 1)


def test_with_room_again_the_run_saves_stops_and_takes_the_larger_mesh() -> None:
    machine, commands = play(m.Machine(), m.Start(shape=HALF), m.Claimed(1), m.Seated(), m.Reshape(WHOLE, 2))
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


def test_an_operators_stop_wins_over_a_change_of_mesh() -> None:
    growing, _ = play(m.Machine(), m.Start(shape=HALF), m.Claimed(1), m.Seated(), m.Reshape(WHOLE, 2))
    machine, _ = play(growing, m.StopAsked(), m.Finished(True), m.AttemptEnded())
    assert machine.state is RunState.STOPPED
    shrinking, _ = play(m.Machine(), m.Start(), m.Claimed(1), m.Reshape(HALF, 4))
    machine, commands = play(shrinking, m.StopAsked(), m.AttemptEnded())
    assert machine.state is RunState.STOPPED and m.Launch() not in commands


def test_a_run_that_finishes_while_it_was_to_grow_has_succeeded() -> None:
    growing, _ = play(m.Machine(), m.Start(shape=HALF), m.Claimed(1), m.Seated(), m.Reshape(WHOLE, 2))
    assert play(growing, m.Finished(False), m.AttemptEnded())[0].state is RunState.SUCCEEDED


def test_a_failure_while_the_run_was_to_grow_keeps_no_process() -> None:
    growing, _ = play(m.Machine(), m.Start(shape=HALF), m.Claimed(1), m.Seated(), m.Reshape(WHOLE, 2))
    assert play(growing, m.RankFailed(failure()))[1] == [m.EndAttempt(keep=False)]


_SHAPES = st.sampled_from([WHOLE, HALF, Shape(1, 1, 1, 1, 1, 8)])
_EVENTS = st.one_of(
    st.builds(m.Reshape, _SHAPES, st.sampled_from([1, 2, 4])),
    st.builds(m.Start, adopted=st.booleans()),
    st.builds(m.Claimed, st.integers(1, 9)),
    st.just(m.Seated()),
    st.builds(m.Committed, st.integers(1, 50)),
    st.builds(m.RankFailed, st.builds(failure, st.sampled_from(["killed", "raised", "lost_peer"]), st.integers(0, 3))),
    st.just(m.NoResources("too small")),
    st.builds(m.Finished, st.booleans()),
    st.just(m.AttemptEnded()),
    st.just(m.DelayOver()),
    st.builds(m.StopAsked, st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_EVENTS, max_size=60), st.integers(0, 3))
def test_whatever_happens_two_attempts_never_live_and_nothing_starts_after_the_end(
    events: list[m.MachineEvent], max_restarts: int
) -> None:
    machine = m.Machine(policy=DefaultPolicy(max_restarts))
    alive = finished = False
    for event in events:
        before = machine
        if isinstance(event, m.AttemptEnded):
            if before.phase is not m.RunPhase.ENDING:
                continue  # what carries out commands says so only after EndAttempt
            alive = False
        machine, commands = m.step(machine, event)
        if isinstance(event, m.Start) and event.adopted and before.phase is m.RunPhase.IDLE:
            assert not commands
            alive = True
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
    machine, _ = play(m.Machine(policy=DefaultPolicy(max_restarts)), m.Start())
    step = in_vain = 0
    for kind, progress in [*attempts, *[("killed", False)] * (max_restarts + 2)]:
        machine, _ = play(machine, m.Claimed(machine.attempt + 1), m.Seated())
        if progress:
            step += 1
            machine, _ = play(machine, m.Committed(step))
        # Different steps: the rule against the same exception twice must not end it sooner.
        machine, _ = play(machine, m.RankFailed(failure(kind, machine.attempt)), m.AttemptEnded())
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
    """Every attempt either finds no room and shrinks, or trains, may take a step, and is offered
    room."""
    shapes = [Shape(1, 1, 1, 1, 1, 8), HALF, WHOLE]
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
