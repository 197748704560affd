"""A run is saved, stopped, resumed, detached from and moved to another mesh. The same job also runs
without Ray."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from laptop import Answer, Laptop, Run, assert_same_weights, numbers, weights
from programs import run_python

pytestmark = [pytest.mark.gate, pytest.mark.timeout(600)]

NAME = "wanderer"
MANY = 4000
Story = dict[str, Any]
"""Answers of commands, and steps."""


@pytest.fixture(scope="module")
def story(laptop: Laptop) -> Story:
    """Returns the result of each command in the run's life. The run ends at step `last`."""
    job = laptop.job(NAME, train__steps=MANY, checkpoint__every_steps=0)
    told: Story = {}
    run = laptop.start(job, "--detach", "--json")
    run.wait()
    told["detach"] = Answer(run.process.returncode, run.out, run.err)
    run.wait_step(2)
    told["same name, running"] = laptop.raypp("submit", str(job), "--resume")
    told["save"] = laptop.raypp("save", NAME)
    told["saved"] = run.commits()[-1]
    told["stop --no-save"] = laptop.raypp("stop", NAME, "--no-save")
    told["after stop --no-save"] = run.commits()[-1]
    told["status"] = laptop.raypp("status", NAME, "--json")
    told["stop again"] = laptop.raypp("stop", NAME)
    told["same name"] = laptop.raypp("submit", str(job))
    told["another model"] = laptop.raypp("submit", str(job), "--resume", "--set", "model.ffn_size=96")
    told["another text"] = laptop.raypp("submit", str(job), "--resume", "--set", "data.seq_len=32")

    resumed = laptop.start(job, "--resume", "--json")
    resumed.until(lambda: resumed.status().get("attempt") == 2, "the second attempt")
    resumed.wait_step(int(told["saved"]) + 1)
    resumed.process.send_signal(signal.SIGINT)
    resumed.wait()
    told["interrupted"] = Answer(resumed.process.returncode, resumed.out, resumed.err)
    at = resumed.status()["step"]
    resumed.wait_step(at + 2)
    told["stop"] = laptop.raypp("stop", NAME)
    stopped = resumed.commits()[-1]
    told["stopped"] = stopped
    more = ("--set", f"train.steps={stopped + 10}", "--set", "mesh.pp=1", "--json")
    told["one rank"] = laptop.raypp("submit", str(job), "--resume", *more, timeout=200)
    told["last"] = stopped + 10
    return told


@pytest.fixture(scope="module")
def without_ray(laptop: Laptop, story: Story) -> Answer:
    """Runs the job of `wanderer` under torchrun, without a stop."""
    job = laptop.job("never-stopped", train__steps=story["last"], checkpoint__every_steps=0)
    launch = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    environment = laptop.environment | laptop.s3.environment() | {"OMP_NUM_THREADS": "1"}
    words = (*launch.split(), "-m", "raypp.train", "--job", str(job))
    done = run_python(*words, code=None, env=environment, timeout=240, cwd=laptop.directory)
    return Answer(done.returncode, done.stdout, done.stderr)


def test_detach_returns_when_the_run_is_accepted(story: Story) -> None:
    told = story["detach"]
    assert told.code == 0
    assert (told.json()["run"], told.json()["state"], told.json()["step"]) == (NAME, "PENDING", None)


def test_save_commits_a_step_while_the_run_goes_on(story: Story) -> None:
    told = story["save"]
    assert told.code == 0 and f"step {story['saved']} is committed" in told.out, told


def test_stop_without_a_save_leaves_the_checkpoints_as_they_were(story: Story) -> None:
    told = story["stop --no-save"]
    assert told.code == 0 and "STOPPED" in told.out, told
    assert story["after stop --no-save"] == story["saved"]
    status = story["status"].json()
    assert status["state"] == "STOPPED" and status["step"] >= story["saved"] and status["error"] is None


def test_to_stop_a_run_that_is_over_says_so_and_succeeds(story: Story) -> None:
    told = story["stop again"]
    assert told.code == 0 and "has ended already: STOPPED" in told.out, told


def test_a_name_that_is_taken_is_refused_and_resume_is_offered(story: Story) -> None:
    told = story["same name"]
    assert told.code == 2 and "--resume" in told.err and NAME in told.err and f"{NAME}.yaml:1" in told.err, told


def test_a_run_that_goes_on_cannot_be_resumed(story: Story) -> None:
    told = story["same name, running"]
    assert told.code == 2 and "is active in this cluster" in told.err and f"raypp stop {NAME}" in told.err, told


@pytest.mark.parametrize(("key", "field"), [("another model", "model.ffn_size"), ("another text", "data.seq_len")])
def test_a_changed_job_is_refused_by_the_name_of_the_field(story: Story, key: str, field: str) -> None:
    told = story[key]
    assert told.code == 2 and field in told.err and "fix:" in told.err and "Traceback" not in told.err, told


def test_ctrl_c_leaves_the_run_going_and_says_how_to_come_back(story: Story) -> None:
    told = story["interrupted"]
    assert told.code == 130, told
    assert f"raypp status {NAME} --watch" in told.err and f"raypp stop {NAME}" in told.err
    assert "Traceback" not in told.err


def test_stop_saves_the_last_step(laptop: Laptop, story: Story) -> None:
    told = story["stop"]
    assert told.code == 0 and f"step-{story['stopped']:08d}" in told.out, told


def test_a_run_goes_on_with_other_ranks_as_if_it_had_never_stopped(
    laptop: Laptop, story: Story, without_ray: Answer
) -> None:
    told = story["one rank"]
    assert told.code == 0, told
    assert (told.json()["state"], told.json()["step"]) == ("SUCCEEDED", story["last"])
    assert without_ray.code == 0, without_ray
    wandered = laptop.raypp("history", NAME).rows()
    straight = laptop.raypp("history", "s3://raypp/tests/never-stopped").rows()
    assert numbers(wandered) == numbers(straight)
    assert sorted({row["attempt"] for row in wandered}) == [1, 2, 3]
    store = laptop.store()
    assert_same_weights(weights(store, NAME), weights(store, "never-stopped"))
    specs = sorted(info.key for info in store.list(f"{NAME}/spec"))
    assert specs == [f"{NAME}/spec-2.json", f"{NAME}/spec-3.json", f"{NAME}/spec.json"]


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
    told = laptop.raypp("delete", NAME, "--yes")
    assert told.code == 0 and "freed" in told.out, told
    assert list(laptop.store().list(f"{NAME}/")) == []
    assert NAME not in laptop.raypp("list").out
