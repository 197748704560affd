"""When a failed attempt is followed by another."""

from __future__ import annotations

from raypp.control.recovery.policies.default import DefaultPolicy
from raypp.control.recovery.policy import AttemptEnd, GiveUp, Restart, restarts_without_progress, root_cause
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure


def failure(kind: str = "killed", cause: str = "gone", step: int = 5, rank: int = 1) -> RankFailure:
    return RankFailure(rank, f"pp{rank}", "10.0.0.1", 100 + rank, FailureKind(kind), cause, step)


def ends(*committed: int | None, kind: str = "killed", step: int = 5) -> list[AttemptEnd]:
    return [AttemptEnd(n + 1, (failure(kind, step=step + n),), done) for n, done in enumerate(committed)]


def test_the_first_failure_is_followed_by_a_restart_without_a_pause() -> None:
    assert DefaultPolicy(3).decide(ends(None)) == Restart(0.0)


def test_restarts_that_bring_no_newer_commit_are_counted_and_paused_longer_each_time() -> None:
    assert [DefaultPolicy(5).decide(ends(*[10] * n)) for n in (2, 3, 4)] == [Restart(1.0), Restart(2.0), Restart(4.0)]


def test_a_run_is_given_up_after_max_restarts_without_a_newer_commit() -> None:
    assert isinstance(DefaultPolicy(3).decide(ends(10, 10, 10)), Restart)
    last = DefaultPolicy(3).decide(ends(10, 10, 10, 10))
    assert isinstance(last, GiveUp) and "3 restarts in a row" in last.reason and last.exit_code == 1


def test_a_newer_commit_starts_the_count_again() -> None:
    assert restarts_without_progress(ends(None, None, None, 10)) == 0
    assert restarts_without_progress(ends(None, 10, 10, 20, 20)) == 1
    assert DefaultPolicy(3).decide(ends(None, None, None, 10)) == Restart(0.0)


def test_no_restart_at_all_when_the_job_allows_none() -> None:
    assert isinstance(DefaultPolicy(0).decide(ends(10)), GiveUp)


def test_an_error_of_the_job_or_its_data_is_not_tried_again() -> None:
    last = DefaultPolicy(3).decide(ends(None, kind="user_error"))
    assert isinstance(last, GiveUp) and last.exit_code == 2


def test_the_same_exception_at_the_same_step_twice_in_a_row_is_not_tried_a_third_time() -> None:
    same = [AttemptEnd(n, (failure("raised", "ValueError: no", 7),), 5) for n in (1, 2)]
    assert isinstance(DefaultPolicy(9).decide(same[:1]), Restart)
    assert isinstance(DefaultPolicy(9).decide(same), GiveUp)
    other = [same[0], AttemptEnd(2, (failure("raised", "ValueError: no", 8),), 5)]
    assert isinstance(DefaultPolicy(9).decide(other), Restart)


def test_a_killed_rank_at_the_same_step_twice_is_tried_again() -> None:
    same = [AttemptEnd(n, (failure("killed", "gone", 7),), 5) for n in (1, 2)]
    assert isinstance(DefaultPolicy(9).decide(same), Restart)


def test_the_cause_is_the_rank_that_died_not_the_one_that_saw_it() -> None:
    witness, dead = failure("lost_peer", "connection reset", rank=0), failure("killed", "gone", rank=3)
    assert root_cause([witness, dead]) == dead
    assert root_cause([witness]) == witness


def test_preemptions_are_not_counted_and_need_no_pause() -> None:
    taken = [AttemptEnd(n, (failure("preempted"),), 10) for n in range(1, 9)]
    assert DefaultPolicy(0).decide(taken) == Restart(0.0)
    assert restarts_without_progress([*ends(10, 10), *taken]) == 1
    assert DefaultPolicy(3).decide([*ends(10), *taken, *ends(10)]) == Restart(1.0)


def test_what_differs_between_two_lives_does_not_make_the_same_error_another_one() -> None:
    causes = ("out of memory: 3.2 GiB of 79 at 0x7f12", "out of memory: 3.9 GiB of 79 at 0x6a00")
    twice = [AttemptEnd(n, (failure("out_of_memory", cause, 7),), 5) for n, cause in enumerate(causes, 1)]
    assert isinstance(DefaultPolicy(9).decide(twice), GiveUp)


def test_a_full_device_is_retried_once_whatever_was_measured_and_never_for_ever() -> None:
    causes = ("tried to allocate 2.0 GiB\nfragmented", "tried to allocate 512 MiB")
    full = [AttemptEnd(n, (failure("device_out_of_memory", cause, 7),), 5) for n, cause in enumerate(causes, 1)]
    assert isinstance(DefaultPolicy(9).decide(full[:1]), Restart)
    assert isinstance(DefaultPolicy(9).decide(full), GiveUp)
    elsewhere = [AttemptEnd(n, (failure("device_out_of_memory", "full", 6 + n),), 5) for n in range(1, 5)]
    assert isinstance(DefaultPolicy(3).decide(elsewhere), GiveUp)


def test_a_device_that_others_fill_is_waited_for_as_often_as_restarts_allow() -> None:
    taken = [AttemptEnd(n, (failure("device_taken", "held by python", 7),), 5) for n in range(1, 5)]
    assert isinstance(DefaultPolicy(3).decide(taken[:2]), Restart)
    assert isinstance(DefaultPolicy(3).decide(taken), GiveUp)


def test_numbers_that_are_not_finite_end_the_run_unless_the_job_wants_another_try() -> None:
    once = [AttemptEnd(1, (failure("nonfinite", "step 7: the loss is nan", 7),), 5)]
    assert isinstance(DefaultPolicy(3).decide(once), GiveUp)
    assert DefaultPolicy(3, restart_on_nonfinite=True).decide(once) == Restart(0.0)
    again = [*once, AttemptEnd(2, once[0].failures, 5)]
    assert isinstance(DefaultPolicy(3, restart_on_nonfinite=True).decide(again), GiveUp)


def test_corrupt_weights_a_full_disk_and_a_silent_store_are_worth_another_try() -> None:
    for kind in ("corrupt", "disk_full", "store_down", "segfault", "raylet_lost", "node_lost", "hung"):
        assert isinstance(DefaultPolicy(3).decide(ends(10, 10, kind=kind, step=7)), Restart)
