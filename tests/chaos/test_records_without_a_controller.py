"""The controller is killed while its ranks run to the end: all records of the run must agree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

import pytest
from laptop import EVERY, STEPS, Laptop, Run, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ANSWER_KEYS = ("run", "state", "step", "loss", "tokens_per_s", "restarts", "checkpoint")


def _disagreements(laptop: Laptop, run: Run, undisturbed: Run) -> list[str]:
    """Returns what commands report wrong about a run that took all its steps in one attempt."""
    history = laptop.raypp("history", run.name).rows()
    last = history[-1]
    truth: dict[str, Any] = {
        "run": run.name,
        "state": "SUCCEEDED",
        "step": STEPS,
        "loss": last["loss"],
        "tokens_per_s": last["tokens_per_s"],
        "restarts": 0,
        "checkpoint": f"{run.url}/{run.name}/step-{STEPS:08d}",
    }
    status = laptop.raypp("status", run.name, "--json").json()
    listed = next(one for one in laptop.raypp("list", "--json").json() if one["run"] == run.name)
    told = {"answer": json.loads(run.out.splitlines()[-1]), "status": status, "list": listed}
    found = [
        f"{where}: {key} is {document[key]}, not {truth[key]}"
        for where, document in told.items()
        for key in _ANSWER_KEYS
        if document[key] != truth[key]
    ]
    if numbers(history) != numbers(undisturbed.history()):
        found.append(f"history: steps {[row['step'] for row in history]}, or other numbers")
    if {(rank["rank"], rank["state"]) for rank in status["ranks"]} != {(0, "done"), (1, "done")}:
        found.append(f"status: ranks are {status['ranks']}")
    if (status["attempt"], status["mesh"]["pp"], status["error"]) != (1, 2, None):
        found.append(f"status: attempt {status['attempt']}, mesh {status['mesh']}, error {status['error']}")
    events = laptop.raypp("events", run.name, "--json").json()
    committed = [event["step"] for event in events if event["kind"] == "committed"]
    if committed != list(range(EVERY, STEPS + 1, EVERY)):
        found.append(f"events: steps {committed} were committed")
    ends = [event["step"] for event in events if event["kind"] in ("succeeded", "failed", "stopped")]
    if ends != [STEPS] or events[-1]["kind"] != "succeeded":
        found.append(f"events: ends are {ends}, the last event is {events[-1]['kind']}")
    return found


@pytest.mark.parametrize("repeat", range(2))
@pytest.mark.parametrize("moment", range(EVERY, STEPS + 1, EVERY))
def test_status_answer_events_and_history_agree_whenever_the_controller_is_killed(
    laptop: Laptop, undisturbed: Run, moment: int, repeat: int
) -> None:
    """`moment` is the newest committed step at the kill."""
    run = laptop.start(laptop.job(f"unled-{moment}-{repeat}"), "--json")
    run.wait_seats(1)
    controller = int(laptop.actors()[f"raypp/{run.name}"]["pid"])
    run.until(lambda: max(run.commits(), default=0) >= moment, f"the commit of step {moment}")
    with contextlib.suppress(ProcessLookupError):  # after the last step it leaves within a second
        os.kill(controller, signal.SIGKILL)
    assert run.wait() == 0, run.told()
    assert not _disagreements(laptop, run, undisturbed)
