"""When a failed attempt is followed by another."""

from collections.abc import Sequence

import pytest

from raypp.control.recovery.policies.default import DefaultPolicy
from raypp.control.recovery.policy import AttemptEnd, GiveUp, Restart, restarts_without_progress, root_cause
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure


def failure(kind: str = "killed", cause: str = "gone", step: int = 5, rank: int = 1) -> RankFailure:
    return RankFailure(rank, f"pp{rank}", "10.0.0.1", 100 + rank, FailureKind(kind), cause, step)


def ends(*committed: int | None, kind: str = "killed", step: int = 5) -> list[AttemptEnd]:
    return [AttemptEnd(n + 1, (failure(kind, step=step + n),), done) for n, done in enumerate(committed)]


def each(kind: str, *causes: str, steps: Sequence[int] = ()) -> list[AttemptEnd]:
    """Attempts that fail one after another, at step 7 or at these, without a newer commit."""
    at = steps or [7] * len(causes)
    return [AttemptEnd(n, (failure(kind, cause, at[n - 1]),), 5) for n, cause in enumerate(causes, 1)]


@pytest.mark.parametrize(
    ("restarts", "ends", "decision"),
    [
        pytest.param(0, ends(10), GiveUp, id="the job allows none"),
        pytest.param(9, each("raised", "ValueError: no"), Restart, id="an exception"),
        pytest.param(9, each("raised", *["ValueError: no"] * 2), GiveUp, id="the same one twice"),
        pytest.param(9, each("raised", *["ValueError: no"] * 2, steps=(7, 8)), Restart, id="at another step"),
        pytest.param(9, each("killed", "gone", "gone"), Restart, id="a killed rank at the same step twice"),
        pytest.param(
            9, each("out_of_memory", "full: 3.2 GiB of 79 at 0x7f12", "full: 3.9 GiB of 79 at 0x6a00"), GiveUp,
            id="the same error but for what differs between two lives",
        ),
        pytest.param(9, each("device_out_of_memory", "tried 2.0 GiB\nfragmented"), Restart, id="a full device"),
        pytest.param(9, each("device_out_of_memory", "tried 2.0 GiB\nfragmented", "tried 512 MiB"), GiveUp, id="again"),
        pytest.param(3, each("device_out_of_memory", *["full"] * 4, steps=range(7, 11)), GiveUp, id="never for ever"),
        pytest.param(3, each("device_taken", *["held by python"] * 2), Restart, id="others fill a device"),
        pytest.param(3, each("device_taken", *["held by python"] * 4), GiveUp, id="as often as restarts allow"),
        *(
            pytest.param(3, ends(10, 10, kind=kind, step=7), Restart, id=kind)
            for kind in ("corrupt", "disk_full", "store_down", "segfault", "raylet_lost", "node_lost", "hung")
        ),
    ],
)  # fmt: skip
def test_what_is_worth_another_try_gets_one(restarts: int, ends: list[AttemptEnd], decision: type) -> None:
    assert isinstance(DefaultPolicy(restarts).decide(ends), decision)


def test_an_error_of_the_job_or_its_data_is_not_tried_again() -> None:
    last = DefaultPolicy(3).decide(ends(None, kind="user_error"))
    assert isinstance(last, GiveUp) and last.exit_code == 2


def test_restarts_that_bring_no_newer_commit_are_counted_and_paused_longer_each_time() -> None:
    assert [DefaultPolicy(5).decide(ends(*[10] * n)) for n in (2, 3, 4)] == [Restart(1.0), Restart(2.0), Restart(4.0)]


def test_a_run_is_given_up_after_max_restarts_without_a_newer_commit() -> None:
    assert isinstance(DefaultPolicy(3).decide(ends(10, 10, 10)), Restart)
    last = DefaultPolicy(3).decide(ends(10, 10, 10, 10))
    assert isinstance(last, GiveUp) and "3 restarts in a row" in last.reason and last.exit_code == 1


def test_a_newer_commit_starts_the_count_again() -> None:
    assert restarts_without_progress(ends(None, None, None, 10)) == 0
    assert restarts_without_progress(ends(None, 10, 10, 20, 20)) == 1
    assert DefaultPolicy(3).decide(ends(None, None, None, 10)) == Restart(0.0) == DefaultPolicy(3).decide(ends(None))


def test_the_cause_is_the_rank_that_died_not_the_one_that_saw_it() -> None:
    witness, dead = failure("lost_peer", "connection reset", rank=0), failure("killed", "gone", rank=3)
    assert root_cause([witness, dead]) == dead
    assert root_cause([witness]) == witness


def test_preemptions_are_not_counted_and_need_no_pause() -> None:
    taken = [AttemptEnd(n, (failure("preempted"),), 10) for n in range(1, 9)]
    assert DefaultPolicy(0).decide(taken) == Restart(0.0)
    assert restarts_without_progress([*ends(10, 10), *taken]) == 1
    assert DefaultPolicy(3).decide([*ends(10), *taken, *ends(10)]) == Restart(1.0)


def test_numbers_that_are_not_finite_end_the_run_unless_the_job_wants_another_try() -> None:
    once = each("nonfinite", "step 7: the loss is nan")
    assert isinstance(DefaultPolicy(3).decide(once), GiveUp)
    assert DefaultPolicy(3, restart_on_nonfinite=True).decide(once) == Restart(0.0)
    again = [*once, AttemptEnd(2, once[0].failures, 5)]
    assert isinstance(DefaultPolicy(3, restart_on_nonfinite=True).decide(again), GiveUp)
