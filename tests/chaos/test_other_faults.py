"""Tests faults outside the table: of data, and of the driver."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from laptop import EVERY, STEPS, Laptop, Run, assert_same_weights, numbers, wait_for

pytestmark = pytest.mark.timeout(600)


def _own_text(laptop: Laptop, name: str) -> Path:
    path = laptop.directory / f"{name}.txt"
    path.write_bytes((laptop.directory / "words.txt").read_bytes())
    return path


def _remove(path: Path) -> None:
    path.unlink()


def _swap(path: Path) -> None:
    path.write_text(path.read_text().replace("the", "a"))


def _kill_driver(laptop: Laptop, run: str) -> None:
    driver = next(job for job in laptop.jobs() if job["metadata"]["raypp_run"] == run)["driver_info"]["pid"]
    os.kill(int(driver), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "reported"),
    [
        pytest.param(_remove, "no file at .*words-removed.txt", id="removed"),
        pytest.param(_swap, "data.path: the checkpoint was made with other data", id="swapped"),
    ],
)
def test_data_that_are_harmed_end_the_run_at_its_next_attempt_and_not_later(
    laptop: Laptop, harm: object, reported: str, request: pytest.FixtureRequest
) -> None:
    name = f"words-{request.node.callspec.id}"
    text = _own_text(laptop, name)
    run = laptop.start(laptop.job(name, data__path=str(text), train__steps=400), "--json")
    ranks = run.wait_titles()
    run.until(run.commits, "a commit")
    if harm is _remove:  # without its driver, the run's exit code comes from its records
        _kill_driver(laptop, name)
    assert callable(harm)
    harm(text)
    ranks["pp0"].kill()
    assert run.wait() == 2, run.describe()
    status = run.status()
    assert (status["state"], status["restarts"]) == ("FAILED", 1)
    assert re.search(reported, status["error"]), status["error"]
    assert "Traceback" not in run.err
    assert wait_for(lambda: not laptop.workers(), "the end of every rank")
    text.write_bytes((laptop.directory / "words.txt").read_bytes())
    again = laptop.raypp("submit", str(laptop.directory / f"{name}.yaml"), "--resume", "--dry-run")
    assert again.code == 0, again  # no process lingers: the run can be resumed at once


@pytest.mark.slow
def test_two_runs_share_a_cluster_and_one_of_them_loses_its_driver(laptop: Laptop, undisturbed: Run) -> None:
    """It trains for longer than `raypp submit` waits for records after a Ray job's end."""
    first = laptop.start(laptop.job("twin-one", train__steps=4 * STEPS), "--json")
    second = laptop.start(laptop.job("twin-two"), "--json")
    first.wait_step(EVERY)
    _kill_driver(laptop, "twin-one")
    for run, steps in ((second, STEPS), (first, 4 * STEPS)):
        assert run.wait() == 0, run.describe()
        answer = json.loads(run.out.splitlines()[-1])
        assert (answer["state"], answer["step"], answer["restarts"]) == ("SUCCEEDED", steps, 0)
        assert numbers(run.history()[:STEPS]) == numbers(undisturbed.history())
        assert [row["step"] for row in run.history()] == list(range(1, steps + 1))
    begun, ended = ([run.events(kind)[0].time for run in (first, second)] for kind in ("submitted", "succeeded"))
    assert max(begun) < min(ended), "the runs were not active at the same time"
    assert_same_weights(second.weights(), undisturbed.weights())
    assert wait_for(lambda: not laptop.workers(), "the end of every rank")
