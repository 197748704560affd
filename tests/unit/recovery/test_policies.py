"""What every recovery policy and every kind of failure keep to, new ones included."""

import json
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.control import machine as m
from raypp.control.machine_log import MachineLog
from raypp.control.recovery.policy import AttemptEnd, GiveUp, Policy, Restart, policy_of, restarts_without_progress
from raypp.errors import EXIT_RUN_FAILED, EXIT_USAGE
from raypp.failure_kinds import FailureKind
from raypp.job.job import RecoverySection
from raypp.kinds import POLICIES
from raypp.records import RankFailure, RunState
from raypp.storage.directory import DirectoryStore

KINDS = list(FailureKind)
PERMANENT = [kind for kind in KINDS if kind.traits.permanent]
UNCOUNTED = [kind for kind in KINDS if not kind.traits.counts]
USUAL = [kind for kind in KINDS if kind not in PERMANENT + UNCOUNTED]
MANY = 200
"""Failed attempts after which a run would be said to be tried for ever."""
LONGEST_DELAY_S = 600.0

policies = pytest.mark.parametrize("name", POLICIES.names())


def policy(name: str, max_restarts: int = 3) -> Policy:
    return policy_of(RecoverySection(policy=name, max_restarts=max_restarts, on_nonfinite="restart"))


def failure(kind: FailureKind, step: int = 5, rank: int = 1) -> RankFailure:
    return RankFailure(rank, f"pp{rank}", f"10.0.0.{rank}", 100 + rank, kind, f"it was {kind}", step)


def end(attempt: int, kind: FailureKind, committed: int | None, step: int = 5) -> AttemptEnd:
    return AttemptEnd(attempt, (failure(kind, step),), committed)


ends = st.builds(
    lambda kinds, committed, step: (tuple(failure(kind, step, rank) for rank, kind in enumerate(kinds)), committed),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.none() | st.integers(0, 9),
    st.integers(0, 9),
)
histories = st.lists(ends, min_size=1, max_size=8).map(
    lambda made: tuple(AttemptEnd(number, *one) for number, one in enumerate(made, 1))
)


@policies
@settings(max_examples=100, deadline=None)
@given(history=histories, max_restarts=st.integers(0, 4))
def test_a_decision_is_the_same_each_time_and_is_one_that_can_be_carried_out(
    name: str, history: tuple[AttemptEnd, ...], max_restarts: int
) -> None:
    first, again = (policy(name, max_restarts).decide(history) for _ in range(2))
    assert first == again
    if isinstance(first, Restart):
        assert math.isfinite(first.delay_s) and 0 <= first.delay_s <= LONGEST_DELAY_S
    else:
        assert isinstance(first, GiveUp) and first.reason and first.exit_code > 0


@policies
@pytest.mark.parametrize("max_restarts", [0, 1, 3])
@pytest.mark.parametrize("kind", USUAL)
def test_a_run_without_progress_is_given_up_after_max_restarts_at_the_latest(
    name: str, kind: FailureKind, max_restarts: int
) -> None:
    history: list[AttemptEnd] = []
    for attempt in range(1, max_restarts + 1):
        history.append(end(attempt, kind, None, step=attempt))
        if isinstance(policy(name, max_restarts).decide(history), GiveUp):
            return
    history.append(end(max_restarts + 1, kind, None, step=max_restarts + 1))
    assert isinstance(policy(name, max_restarts).decide(history), GiveUp)


@policies
@pytest.mark.parametrize("kind", USUAL)
def test_a_failure_that_comes_at_another_step_after_each_new_checkpoint_never_ends_a_run(
    name: str, kind: FailureKind
) -> None:
    history = [end(attempt, kind, 10 * attempt, step=10 * attempt + 5) for attempt in range(1, MANY)]
    for attempts in (1, 2, MANY):
        assert isinstance(policy(name, 1).decide(history[:attempts]), Restart)


@policies
@pytest.mark.parametrize("kind", PERMANENT)
def test_a_permanent_failure_ends_the_run_at_once_with_its_exit_code(name: str, kind: FailureKind) -> None:
    decision = policy(name, 99).decide([end(1, FailureKind.KILLED, 10), end(2, kind, 20, step=25)])
    assert isinstance(decision, GiveUp) and decision.exit_code == kind.traits.exit_code
    assert f"it was {kind}" in decision.reason


@policies
@pytest.mark.parametrize("kind", UNCOUNTED)
def test_what_does_not_count_is_followed_by_a_restart_however_often_and_changes_no_later_decision(
    name: str, kind: FailureKind
) -> None:
    taken = [end(attempt, kind, 10) for attempt in range(1, MANY)]
    assert isinstance(policy(name, 0).decide(taken), Restart)
    killed = [end(attempt, FailureKind.KILLED, 10) for attempt in (1, 2)]
    assert policy(name).decide([killed[0], *taken, killed[1]]) == policy(name).decide(killed)
    assert restarts_without_progress([*killed, *taken]) == 1


@policies
@settings(max_examples=100, deadline=None)
@given(history=histories)
def test_a_later_life_of_the_controller_decides_the_same_by_the_history_it_reads(
    name: str, history: tuple[AttemptEnd, ...]
) -> None:
    with TemporaryDirectory() as folder:
        log = MachineLog(DirectoryStore(Path(folder)), "r", "c-1")
        log.open(1)
        log.put(m.Machine(history=history))
        log.write()
        left = MachineLog(DirectoryStore(Path(folder)), "r", "c-2").open(1)
    assert left is not None and policy(name).decide(left.history) == policy(name).decide(history)


@policies
@settings(max_examples=100, deadline=None)
@given(attempts=st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=30), max_restarts=st.integers(0, 4))
def test_a_run_led_by_it_ends_and_never_restarts_in_vain_more_often_than_the_job_allows(
    name: str, attempts: Sequence[tuple[FailureKind, bool]], max_restarts: int
) -> None:
    machine, _ = m.step(m.Machine(), m.Start())
    step = in_vain = 0
    last: int | None = None
    for kind, progress in [*attempts, *[(FailureKind.KILLED, False)] * (max_restarts + 2)]:
        events: list[m.MachineEvent] = [m.Claimed(machine.attempt + 1), m.Seated()]
        if progress:
            step += 1
            events.append(m.Committed(step))
        for event in [*events, m.RankFailed(failure(kind, machine.attempt)), m.AttemptEnded()]:
            machine, _ = m.step(machine, event, policy(name, max_restarts))
        if machine.phase is m.RunPhase.DONE:
            break
        if kind.traits.counts:
            in_vain = 0 if last is None or step > last else in_vain + 1
            last = step
        assert in_vain <= max_restarts
        machine, _ = m.step(machine, m.DelayOver())
    assert machine.state is RunState.FAILED


# Kinds of failure
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_kind_is_what_stores_and_answers_hold(kind: FailureKind) -> None:
    assert json.loads(json.dumps({"kind": kind})) == {"kind": str(kind)} == {"kind": kind.value}
    assert FailureKind(str(kind)) is kind is pickle.loads(pickle.dumps(kind))
    assert f"{kind}" == kind.name.lower() and kind.traits.words


@pytest.mark.parametrize("kind", KINDS)
def test_the_traits_of_a_kind_do_not_contradict_each_other(kind: FailureKind) -> None:
    traits = kind.traits
    assert traits.exit_code == (EXIT_USAGE if kind is FailureKind.USER_ERROR else EXIT_RUN_FAILED)
    assert not (traits.permanent and not traits.counts), "a failure cannot both end the run and count for nothing"
    assert not (traits.keeps_process and (traits.ends_process or traits.node_lost)), "its process is gone"
    assert not (traits.witness and (traits.permanent or traits.recurring)), "a witness explains nothing"


def test_the_page_on_reliability_has_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.partition("| kind |")[2].partition("\n\n")[0].splitlines()[2:]
    kinds = [word for row in table for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(kinds) == sorted(KINDS)
