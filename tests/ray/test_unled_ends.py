"""Ranks end while the controller is down: the restarted controller records the correct outcome."""

import os
import signal
import threading
from typing import Any

import pytest

from tests.ray.conftest import Started, StartRun

pytestmark = pytest.mark.timeout(400)

STEPS = 120


def _freeze_and_run_out(run: Started) -> int:
    """Freezes the controller, until its ranks have taken all steps. Returns its process."""
    run.wait_step(3)
    controller = run.controller()
    os.kill(controller, signal.SIGSTOP)
    run.let_go()
    run.wait((run.place / "over-1").exists, "the last step")
    assert run.status()["step"] < STEPS
    return controller


def _all(run: Started, number: int) -> None:
    for pid in run.pids():
        os.kill(pid, number)


def _assert_all_agree(run: Started, status: dict[str, Any], end: str, step: int) -> None:
    history, events = run.reader.history(), run.reader.events()
    assert [row["step"] for row in history] == list(range(1, step + 1))
    records = (status["state"], status["step"], status["loss"], status["tokens_per_s"], status["attempt"])
    assert records == (end.upper(), step, history[-1]["loss"], history[-1]["tokens_per_s"], 1)
    assert (status["restarts"], len(status["ranks"]), status["mesh"]["fsdp"]) == (0, 4, 2)
    ends = [(one.kind, one.step) for one in events if one.kind in ("succeeded", "failed", "stopped")]
    assert ends == [(end, step)]
    newest = max((one.step for one in events if one.kind == "committed"), default=None)
    assert status["checkpoint"] == (newest and f"{run.url}/{run.name}/step-{newest:08d}")
    assert run.exit_code() == status_code(status)
    log = run.cluster.dashboard.job_logs(run.submission_id)
    assert log.splitlines()[-1].startswith(f"{end}: ")


def status_code(status: dict[str, Any]) -> int:
    """Returns a run's exit code. One that stopped without its last checkpoint is no success."""
    saved = str(status["checkpoint"]).endswith(f"step-{status['step']:08d}")
    return {"FAILED": 2, "STOPPED": int(not saved)}.get(status["state"], 0)


@pytest.mark.gate
def test_ranks_that_wait_with_their_last_words_are_heard(start_run: StartRun) -> None:
    run = start_run("waiting", steps=STEPS, hold=4)
    os.kill(_freeze_and_run_out(run), signal.SIGKILL)
    status = run.wait_end()
    _assert_all_agree(run, status, "succeeded", STEPS)
    assert {rank["state"] for rank in status["ranks"]} == {"done"}
    committed = [event.step for event in run.reader.events() if event.kind == "committed"]
    assert committed == list(range(5, STEPS + 1, 5))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
def test_a_stop_that_was_asked_for_is_not_forgotten(start_run: StartRun, number: signal.Signals) -> None:
    """The controller dies before the ranks learn of the stop; they go on, or are killed too."""
    run = start_run(f"stop-{number.name.lower()}", steps=100_000, every=0)
    run.wait_step(3)
    controller = run.controller()
    _all(run, signal.SIGSTOP)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(run.stop()))
    asking.start()
    run.wait(lambda: "stop_requested" in run.kinds(), "the stop")
    os.kill(controller, signal.SIGKILL)
    _all(run, number)
    status = run.wait_end()
    asking.join()
    _assert_all_agree(run, status, "stopped", status["step"])
    end = {"found": True, "state": "STOPPED", "step": status["step"], "checkpoint": status["checkpoint"]}
    assert len(answers) == 1 and end.items() <= answers[0].items(), "the command found no controller"
    assert answers[0]["exit_code"] == status_code(status), answers
    assert run.kinds().count("stop_requested") == 1
    if number == signal.SIGCONT:  # the stand-ins' commits hold no data; the last one is always that of the last step
        assert status["checkpoint"].endswith(f"step-{status['step']:08d}")
    run.assert_nothing_left()
