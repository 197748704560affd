"""Ranks report through a relay: every report is written exactly once when the relay or the
controller dies."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest

from tests.ray.conftest import Started, StartRun

pytestmark = pytest.mark.timeout(400)


def _relayed(start_run: StartRun, name: str, **recovery: Any) -> Started:
    """Starts a run that has a relay, and waits for some steps."""
    recovery |= {"standby": False}
    run = start_run(name, rank_function="teller:run_rank", relays_from_ranks=4, recovery=recovery)
    run.wait_step(5)
    return run


def _relays(run: Started) -> dict[str, int]:
    """Returns the process ID of every living relay, by actor ID."""
    living = (one for one in run.actors() if one["class_name"] == "Relay" and one["state"] == "ALIVE")
    return {one["actor_id"]: one["pid"] for one in living}


def _kill_relay(run: Started) -> None:
    """Kills the relay, and waits until Ray has restarted it."""
    ((name, pid),) = _relays(run).items()
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: _relays(run).get(name, pid) != pid, "the relay's restart")


def _wait_for_relay_reports(run: Started) -> dict[str, Any]:
    """Waits until the relay reports to the current controller process. Returns its facts."""
    facts: dict[str, Any] = {}

    def spoken() -> bool:
        facts.update(run.command("facts"))
        return facts["relay_reports"] > 2

    run.wait(spoken, "relay reports")
    return facts


def _steps(run: Started, rank: int) -> range:
    return range(1, int((run.place / f"told-{rank}").read_text()) + 1)


def _assert_events_are_written(run: Started) -> None:
    events = Counter(event.message for event in run.reader.events() if event.kind == "told")
    for rank in range(4):
        assert [events[f"{rank} tells {number}"] for number in _steps(run, rank)] == [1] * len(_steps(run, rank))


def _assert_lines_are_written(run: Started) -> None:
    lines = {(line.rank, line.text) for line in run.reader.logs()}
    for rank in range(4):
        missing = [number for number in _steps(run, rank) if (rank, f"line {number}") not in lines]
        assert not missing, f"lines of rank {rank} are missing: {missing}"


@pytest.mark.gate
def test_when_the_relay_is_killed_nothing_is_lost_and_the_run_leaves_nothing_behind(start_run: StartRun) -> None:
    run = _relayed(start_run, "relayed")
    run.wait(lambda: len(_relays(run)) == 1, "the relay")
    _wait_for_relay_reports(run)
    for _ in range(2):
        _kill_relay(run)
    (run.place / "finish").touch()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    assert any("reporting directly: the relay does not answer" in line.text for line in run.reader.logs())
    _assert_events_are_written(run)
    _assert_lines_are_written(run)
    run.assert_nothing_left()


@pytest.mark.slow
def test_ranks_report_to_a_restarted_controller_directly(start_run: StartRun) -> None:
    run = _relayed(start_run, "relayed-on")
    before = _wait_for_relay_reports(run)["controller_pid"]
    os.kill(before, signal.SIGKILL)
    run.wait(lambda: "controller_restarted" in run.kinds(), "the controller's restart")
    run.wait(lambda: not _relays(run), "the end of the killed controller's relay")
    (run.place / "finish").touch()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    _assert_events_are_written(run)
    run.assert_nothing_left()


@pytest.mark.slow
def test_without_a_controller_nothing_is_left(start_run: StartRun) -> None:
    run = _relayed(start_run, "relayed-orphans", orphan_timeout_s=5)
    run.wait(lambda: len(_relays(run)) == 1, "the relay")
    run.end_controller_for_good()
    run.assert_nothing_left()
