"""A run of stand-ins on a real Ray cluster: seats, faults, commands, what is left afterwards."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from raypp.control import client
from raypp.control.clusters import known_runs
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import present_status
from raypp.job.load import parse_job
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore
from tests.ray.conftest import Started, StartRun, running

pytestmark = pytest.mark.timeout(400)


def _environment(run, rank: int) -> dict[str, str]:
    lines = (run.place / f"environment-{rank}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_a_run_reaches_its_end_and_leaves_nothing_behind(start_run: StartRun) -> None:
    run = start_run("plain", steps=120, hold=3)
    run.wait_step(2)
    pids = run.pids()

    def titles() -> list[str]:  # a rank that has just started may still have Ray's own title
        return [" ".join(psutil.Process(pid).cmdline()).strip() for pid in pids]

    expected = [f"ray::raypp/plain/pp{pp}-fsdp{fsdp}" for pp in range(2) for fsdp in range(2)]
    run.wait(lambda: titles() == expected, f"the titles {expected}")
    actors = run.actors()
    run.let_go()
    assert {actor["name"] for actor in actors} >= {"raypp/plain", "raypp/plain/pp0-fsdp0", "raypp/plain/pp1-fsdp1"}
    assert {actor["repr_name"] for actor in actors} >= {"raypp/plain/pp1-fsdp0"}

    status = run.wait_end()
    assert (status["state"], status["step"], status["restarts"], status["attempt"]) == ("SUCCEEDED", 120, 0, 1)
    assert run.exit_code() == 0
    assert run.job()["metadata"]["job_name"] == "plain"  # the Name column of the dashboard's Jobs page
    assert [row["step"] for row in run.reader.history()] == list(range(1, 121))
    run.assert_nothing_left()
    assert run.groups() == {"REMOVED"}
    _assert_environment_as_of_torchrun(run)
    lines = [line for line in run.reader.logs() if line.rank == 3]
    assert ("hello from pp1-fsdp1", "pp1-fsdp1", "out") in [(line.text, line.label, line.stream) for line in lines]
    assert ("native words of pp1-fsdp1", "err") in [(line.text, line.stream) for line in lines]


def _assert_environment_as_of_torchrun(run: Started) -> None:
    environments = [_environment(run, rank) for rank in range(4)]
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in environments} == {env["LOCAL_WORLD_SIZE"] for env in environments} == {"4"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1
    assert {env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] for env in environments} == {"1"}


@pytest.mark.slow
def test_a_policy_of_the_users_own_decides_in_place_of_the_default_one(start_run: StartRun) -> None:
    run = start_run("own-policy", fault="raise:1:3:99", recovery={"policy": "own_policy:build"})
    status = run.wait_end()
    assert (status["state"], status["restarts"]) == ("FAILED", 0)
    assert "one life is enough" in status["error"] and "the sun is too bright" in status["error"]
    assert run.exit_code() == 7
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_policy_that_the_cluster_lacks_ends_the_run_with_the_exit_code_of_wrong_input(start_run: StartRun) -> None:
    run = start_run("no-policy", recovery={"policy": "not_installed:build"})
    status = run.wait_end()
    assert (status["state"], status["attempt"]) == ("FAILED", 0)
    assert "cannot import 'not_installed'" in status["error"]
    assert run.exit_code() == 2
    run.assert_nothing_left()


@pytest.mark.slow
def test_stopping_the_ray_job_ends_the_run(start_run: StartRun) -> None:
    run = start_run("jobstop", steps=4000, every=0)
    run.wait_step(3)
    run.cluster.dashboard.stop_job(run.submission_id)
    assert run.wait_end()["state"] == "STOPPED"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_driver_that_was_silent_when_the_run_ended_has_its_exit_code(start_run: StartRun) -> None:
    """The controller waits only briefly for a driver of which it has heard nothing."""
    run = start_run("silent-driver", steps=120, hold=6)
    run.wait_step(5)
    driver = int(run.job()["driver_info"]["pid"])
    os.kill(driver, signal.SIGSTOP)
    run.let_go()
    try:
        assert run.wait_end()["state"] == "SUCCEEDED"
        run.wait(lambda: not run.living_actors(), "the end of the controller")
    finally:
        os.kill(driver, signal.SIGCONT)
    assert run.exit_code() == 0


@pytest.mark.gate
def test_a_controller_that_cannot_be_made_ends_the_job_with_the_reason(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "soon")  # read where a store on S3 is opened: by the controller
    job = parse_job({"name": "unmade", "checkpoint": {"url": "s3://nowhere"}})
    submission_id = client.submit_run(job, cluster, job.checkpoint.url, rank_function="stand_in:run_rank")
    reader = RunReader(DirectoryStore(tmp_path), "unmade")
    run = Started("unmade", cluster, submission_id, reader, tmp_path, job.checkpoint.url)
    try:
        assert run.exit_code() == 2
    finally:
        cluster.dashboard.stop_job(submission_id)
    log = cluster.dashboard.job_logs(submission_id)
    message = (
        "the run's controller could not be started: RAYPP_STORE_PATIENCE_S: 'soon' is not a number of seconds\n  fix:"
    )
    assert message in log and "Traceback" not in log, log
    assert message in run.job()["message"]  # which `raypp submit` shows
    place = RunPlace(str(tmp_path), "unmade", cluster.address, submission_id, time.time() - 60)
    status = present_status(place, reader)
    assert status["state"] == "FAILED" and status["error"].startswith(message), status
    run.assert_nothing_left()


@pytest.mark.slow
def test_runs_of_one_name_in_two_stores_are_led_beside_each_other(start_run: StartRun, tmp_path: Path) -> None:
    mine = start_run("twice", steps=2000, mesh={"pp": 2}, url=str(tmp_path / "mine"))
    hers = start_run("twice", steps=2000, mesh={"pp": 2}, url=str(tmp_path / "hers"))
    for run in (mine, hers):
        run.wait_step(3)
    assert len({pid for run in (mine, hers) for pid in run.pids()}) == 4
    answer = mine.command("stop", True)
    assert (answer["found"], answer["state"]) == (True, "STOPPED")
    assert mine.status()["state"] == "STOPPED"
    mine.wait(lambda: known_runs.controller_alive(mine.run_place, 20.0) is False, "the end of its controller")
    assert not mine.command("facts")["found"] and hers.command("facts")["found"]
    assert hers.status()["state"] == "RUNNING"
    step = hers.status()["step"]
    hers.wait(lambda: hers.status()["step"] > step, "more steps")
    assert hers.command("stop", False)["state"] == "STOPPED"
    hers.wait(lambda: not running([*mine.pids(), *hers.pids()]), "the end of all ranks")
