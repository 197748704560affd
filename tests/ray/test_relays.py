"""Ranks that report by relays: whichever relay or controller dies, all that they tell is written, once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest

from tests.ray.conftest import Started, StartRun

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

TWO_LEVELS = {"from_ranks": 4, "ranks_each": 2, "relays_each": 2, "most_callers": 1}


def _relays(run: Started) -> dict[str, int]:
    """The process of every living relay, by name."""
    return {one["name"]: one["pid"] for one in run.actors() if "/relay-" in one["name"] and one["state"] == "ALIVE"}


def _kill(run: Started, place: str) -> None:
    """Kills a relay, and waits until Ray has started it again."""
    name, pid = next((name, pid) for name, pid in _relays(run).items() if f"/relay-{place}-" in name)
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: _relays(run).get(name, pid) != pid, f"relay {place} again")


def _wait_for_parcels(run: Started) -> dict[str, Any]:
    """Until relays speak to the present life of the controller; what that says of itself."""
    facts: dict[str, Any] = {}

    def spoken() -> bool:
        facts.update(run.command("facts"))
        return facts["parcels"] > 2

    run.wait(spoken, "parcels of relays")
    return facts


def _told(run: Started, rank: int) -> range:
    return range(1, int((run.place / f"told-{rank}").read_text()) + 1)


def _assert_events_are_written(run: Started) -> None:
    events = Counter(event.message for event in run.reader.events() if event.kind == "told")
    for rank in range(4):
        assert [events[f"{rank} tells {number}"] for number in _told(run, rank)] == [1] * len(_told(run, rank))


def _assert_lines_are_written(run: Started) -> None:
    lines = {(line.rank, line.text) for line in run.reader.logs()}
    for rank in range(4):
        missing = [number for number in _told(run, rank) if (rank, f"line {number}") not in lines]
        assert not missing, f"lines of rank {rank} are missing: {missing}"


def test_whatever_relay_is_killed_nothing_is_lost_and_the_run_ends_with_nothing_left(start_run: StartRun) -> None:
    run = start_run("relayed", rank_function="teller:run_rank", relays=TWO_LEVELS, recovery={"standby": False})
    run.wait_step(5)
    run.wait(lambda: len(_relays(run)) == 3, "two relays and one above them")
    _wait_for_parcels(run)
    for place in ("0-0", "0-1", "1-0"):
        _kill(run, place)
    (run.place / "finish").touch()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    assert any("reporting directly: the relay does not answer" in line.text for line in run.reader.logs())
    _assert_events_are_written(run)
    _assert_lines_are_written(run)
    run.assert_nothing_left()


@pytest.mark.slow
def test_relays_go_on_with_the_controllers_next_life_and_leave_with_it(start_run: StartRun) -> None:
    run = start_run("relayed-on", rank_function="teller:run_rank", relays=TWO_LEVELS, recovery={"standby": False})
    run.wait_step(5)
    before = _wait_for_parcels(run)["controller_pid"]
    os.kill(before, signal.SIGKILL)
    run.wait(lambda: "controller_restarted" in run.kinds(), "the controller's next life")
    assert _wait_for_parcels(run)["controller_pid"] != before
    (run.place / "finish").touch()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    _assert_events_are_written(run)
    run.assert_nothing_left()


@pytest.mark.slow
def test_relays_that_nobody_leads_any_more_end_themselves(start_run: StartRun) -> None:
    recovery = {"orphan_timeout_s": 5, "standby": False}
    run = start_run("relayed-orphans", rank_function="teller:run_rank", relays=TWO_LEVELS, recovery=recovery)
    run.wait_step(5)
    run.wait(lambda: len(_relays(run)) == 3, "two relays and one above them")
    run.end_controller_for_good()
    run.assert_nothing_left()
