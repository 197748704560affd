"""A run is saved, stopped, resumed and left; the same job runs without Ray, in S3."""

import signal
from typing import Any

import pytest
from held_back import held_back
from laptop import Answer, Laptop, Run, assert_same_weights, numbers, weights
from programs import run_python

pytestmark = [pytest.mark.gate, pytest.mark.timeout(600)]

NAME = "wanderer"
MANY = 4000
Story = dict[str, Any]
"""Answers of commands, and steps."""


@pytest.fixture(scope="module")
def story(laptop: Laptop) -> Story:
    """Returns the result of each command in the run's life. It is held back: `without_ray`
    takes all its steps again."""
    in_directory = {"url": str(laptop.directory / "store"), "every_steps": 0}
    job = laptop.job(NAME, train__steps=MANY, checkpoint=in_directory)
    reported: Story = {}
    run = laptop.start(job, "--detach", "--json")
    run.wait()
    reported["detach"] = Answer(run.process.returncode, run.out, run.err)
    with held_back([rank.pid for rank in run.wait_seats(1).values()], pause_s=0.1):
        run.wait_step(2)
        reported["same name, running"] = laptop.raypp("submit", str(job), "--resume")
        reported["save"] = laptop.raypp("save", NAME)
        reported["saved"] = run.commits()[-1]
        reported["stop --no-save"] = laptop.raypp("stop", NAME, "--no-save")
    reported["after stop --no-save"] = run.commits()[-1]
    reported["status"] = laptop.raypp("status", NAME, "--json")
    reported["stop again"] = laptop.raypp("stop", NAME)
    reported["same name"] = laptop.raypp("submit", str(job))
    reported["another model"] = laptop.raypp("submit", str(job), "--resume", "--set", "model.ffn_size=96")

    resumed = laptop.start(job, "--resume", "--json")
    with held_back([rank.pid for rank in resumed.wait_seats(2).values()], pause_s=0.1):
        resumed.wait_step(int(reported["saved"]) + 10)
        resumed.process.send_signal(signal.SIGINT)
        resumed.wait()
        reported["interrupted"] = Answer(resumed.process.returncode, resumed.out, resumed.err)
        resumed.wait_step(resumed.status()["step"] + 2)
        watch = laptop.popen("status", NAME, "--watch")
        reported["stop"] = laptop.raypp("stop", NAME)
    out, err = watch.communicate(timeout=150)
    reported["watch"] = Answer(watch.returncode, out, err)
    reported["stopped"] = resumed.commits()[-1]
    return reported


@pytest.fixture(scope="module")
def without_ray(laptop: Laptop, story: Story) -> Answer:
    """Runs the job of `wanderer` under torchrun, without a stop."""
    job = laptop.job("never-stopped", train__steps=story["stopped"], checkpoint__every_steps=0)
    launch = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    environment = laptop.environment | laptop.s3.environment() | {"OMP_NUM_THREADS": "1"}
    words = (*launch.split(), "-m", "raypp.rank", "--job", str(job))
    done = run_python(*words, code=None, env=environment, timeout=240, cwd=laptop.directory)
    return Answer(done.returncode, done.stdout, done.stderr)


def test_detach_returns_when_the_run_is_accepted(story: Story) -> None:
    reported = story["detach"]
    assert reported.code == 0
    assert (reported.json()["run"], reported.json()["state"], reported.json()["step"]) == (NAME, "PENDING", None)
    assert f"raypp status {NAME} --watch" in reported.err


def test_save_commits_a_step_while_the_run_goes_on(story: Story) -> None:
    reported = story["save"]
    assert reported.code == 0 and f"step {story['saved']} is committed" in reported.out, reported


def test_stop_without_a_save_leaves_the_checkpoints_as_they_were(story: Story) -> None:
    reported = story["stop --no-save"]
    assert reported.code == 0 and "STOPPED" in reported.out, reported
    assert story["after stop --no-save"] == story["saved"]
    status = story["status"].json()
    assert status["state"] == "STOPPED" and status["step"] >= story["saved"] and status["error"] is None


def test_to_stop_a_run_that_is_over_says_so_and_succeeds(story: Story) -> None:
    reported = story["stop again"]
    assert reported.code == 0 and "has ended already: STOPPED" in reported.out, reported


def test_a_name_that_is_taken_is_refused_and_resume_is_offered(story: Story) -> None:
    reported = story["same name"]
    assert (
        reported.code == 2 and "--resume" in reported.err and NAME in reported.err and f"{NAME}.yaml:1" in reported.err
    ), reported


def test_a_run_that_goes_on_cannot_be_resumed(story: Story) -> None:
    reported = story["same name, running"]
    assert (
        reported.code == 2 and "is active in this cluster" in reported.err and f"raypp stop {NAME}" in reported.err
    ), reported


def test_a_changed_job_is_refused_by_the_name_of_the_field(story: Story) -> None:
    reported = story["another model"]
    assert reported.code == 2 and "Traceback" not in reported.err, reported
    assert "model.ffn_size" in reported.err and "fix:" in reported.err, reported


def test_ctrl_c_leaves_the_run_going_and_says_how_to_come_back(story: Story) -> None:
    reported = story["interrupted"]
    assert reported.code == 130, reported
    assert f"raypp status {NAME} --watch" in reported.err and f"raypp stop {NAME}" in reported.err
    assert "Traceback" not in reported.err


def test_stop_saves_the_last_step(laptop: Laptop, story: Story) -> None:
    reported = story["stop"]
    assert reported.code == 0 and f"step-{story['stopped']:08d}" in reported.out, reported


def test_who_watches_a_run_sees_its_end(story: Story) -> None:
    assert story["watch"].code == 0 and "STOPPED" in story["watch"].out, story["watch"]


def test_a_run_goes_on_as_if_it_had_never_stopped(laptop: Laptop, story: Story, without_ray: Answer) -> None:
    assert without_ray.code == 0, without_ray
    wandered = laptop.raypp("history", NAME).rows()
    straight = laptop.raypp("history", "s3://raypp/tests/never-stopped").rows()
    assert numbers(wandered) == numbers(straight)
    assert sorted({row["attempt"] for row in wandered}) == [1, 2]
    store = laptop.store(str(laptop.directory / "store"))
    assert_same_weights(weights(store, NAME), weights(laptop.store(), "never-stopped"))
    assert sorted(info.key for info in store.list(f"{NAME}/spec")) == [f"{NAME}/spec-2.json", f"{NAME}/spec.json"]


def test_torchrun_gives_the_numbers_of_submit(laptop: Laptop, undisturbed: Run, without_ray: Answer) -> None:
    assert without_ray.code == 0, without_ray
    straight = laptop.raypp("history", "s3://raypp/tests/never-stopped").rows()
    common = min(len(straight), len(undisturbed.history()))
    assert common > 10
    assert numbers(straight[:common]) == numbers(undisturbed.history()[:common])
    status = laptop.raypp("status", "s3://raypp/tests/never-stopped", "--json").json()
    assert (status["state"], status["step"], status["restarts"]) == ("SUCCEEDED", len(straight), 0)


def test_nothing_of_the_stopped_runs_lives_on(laptop: Laptop, story: Story) -> None:
    assert not laptop.workers()
    assert not [name for name in laptop.actors() if name.startswith(f"raypp/{NAME}")]


def test_a_deleted_run_is_gone_from_store_and_cluster(laptop: Laptop, story: Story) -> None:
    assert story["detach"].json()["job_id"] in {one["submission_id"] for one in laptop.dashboard.jobs()}
    for run, url in ((NAME, str(laptop.directory / "store")), ("s3://raypp/tests/never-stopped", "s3://raypp/tests")):
        reported = laptop.raypp("delete", run, "--yes")
        assert reported.code == 0 and "freed" in reported.out, reported
        assert list(laptop.store(url).list(f"{run.rpartition('/')[2]}/")) == []
    assert NAME not in laptop.raypp("list").out
