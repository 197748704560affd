"""Processes that outlive an attempt, attempts that outlive a controller, with stand-ins."""

import os
import signal

import pytest

from tests.ray.conftest import StartRun

pytestmark = pytest.mark.timeout(400)


def test_survivors_keep_their_processes_and_a_standby_takes_the_dead_ones_place(start_run: StartRun) -> None:
    victim = 2
    run = start_run("survive", steps=240, hold=13)
    run.wait_step(12)

    def standbys() -> list[str]:
        return [one["name"] for one in run.actors() if "standby" in one["name"] and one["state"] == "ALIVE"]

    run.wait(standbys, "a standby that runs")
    (standby,) = standbys()
    before = run.pids()
    os.kill(before[victim], signal.SIGKILL)
    run.wait_attempt(2)
    after = run.pids()
    assert [one == other for one, other in zip(before, after, strict=True)] == [rank != victim for rank in range(4)]
    assert after[victim] == next(actor["pid"] for actor in run.actors() if actor["name"] == standby)
    assert run.event("restarting").details["kept"] == 3
    failed = run.event("rank_failed")
    assert (failed.rank, failed.details["kind"], failed.details["pid"]) == (victim, "killed", before[victim])
    assert f"pid {before[victim]}" in run.status()["error"]
    run.let_go()
    status = run.wait_end()
    assert (status["state"], status["step"], status["restarts"], status["attempt"]) == ("SUCCEEDED", 240, 1, 2)
    assert [row["step"] for row in run.reader.history()] == list(range(1, 241))
    run.assert_nothing_left()


@pytest.mark.slow
def test_training_goes_on_while_the_controller_is_dead_and_its_next_life_misses_nothing(start_run: StartRun) -> None:
    run = start_run("phoenix", steps=150, hold=13)
    run.wait_step(12)
    before = run.pids()
    os.kill(run.controller(), signal.SIGKILL)
    run.let_go()
    run.wait(lambda: "controller_restarted" in run.kinds(), "the controller's next life")
    status = run.wait_end()
    assert (status["state"], status["step"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 150, 1, 0)
    assert run.pids() == before
    assert run.taken() == [(1, step) for step in range(1, 151)], "a step was repeated"
    assert [row["step"] for row in run.reader.history()] == list(range(1, 151))
    committed = [event.step for event in run.reader.events() if event.kind == "committed"]
    assert committed == list(range(5, 151, 5))
    assert run.kinds().count("device_chosen") == 1
    assert sorted(run.event("controller_restarted").details["pids"]) == sorted(before)
    assert run.exit_code() == 0
    run.assert_nothing_left()


@pytest.mark.slow
def test_restarts_that_were_used_up_under_a_killed_controller_count_under_the_next(start_run: StartRun) -> None:
    recovery = {"max_restarts": 1}
    run = start_run("budget", steps=120, every=0, fault="exit:2:60:99", hold=30, hold_from=2, recovery=recovery)
    run.wait(lambda: (2, 29) in run.taken(), "the last attempt")
    os.kill(run.controller(), signal.SIGKILL)
    run.let_go()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("FAILED", 2, 1)
    assert "1 restarts in a row brought no newer checkpoint" in status["error"]
    assert run.taken() == [(attempt, step) for attempt in (1, 2) for step in range(1, 61)]
    assert run.kinds().count("rank_failed") >= 2 and "controller_restarted" in run.kinds()
    assert run.exit_code() == 1
    run.assert_nothing_left()


@pytest.mark.slow
def test_ranks_that_nobody_leads_any_more_save_and_leave_nothing(start_run: StartRun) -> None:
    run = start_run("orphans", steps=100_000, every=0, recovery={"orphan_timeout_s": 3})
    run.wait_step(8)
    run.end_controller_for_good()
    run.assert_nothing_left()
    assert (run.place / "commit").exists(), "no last save"
