"""Ranks that report by relays: whichever relay or controller dies, all that they tell is written, once."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.ray.conftest import Started, StartRun

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

TWO_LEVELS = {"from_ranks": 4, "ranks_each": 2, "relays_each": 2, "most_callers": 1}


def _relays(run: Started) -> dict[str, int]:
    """The process of every living relay, by name."""
    return {one["name"]: one["pid"] for one in run.actors() if "/relay-" in one["name"] and one["state"] == "ALIVE"}


def _kill(run: Started, place: str) -> None:
    """Kills a relay, and waits until Ray has started it again and parcels come anew."""
    name, pid = next((name, pid) for name, pid in _relays(run).items() if f"/relay-{place}-" in name)
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: _relays(run).get(name, pid) != pid, f"relay {place} again")
    _wait_for_parcels(run, 5)


def _wait_for_parcels(run: Started, more: int) -> None:
    before = run.command("facts")["parcels"]
    run.wait(lambda: run.command("facts")["parcels"] not in range(before + more), "parcels of relays")


def _assert_all_is_written(run: Started) -> None:
    events = Counter(event.message for event in run.reader.events() if event.kind == "told")
    lines = Counter((line.rank, line.text) for line in run.reader.logs() if line.text.startswith("line "))
    for rank in range(4):
        told = range(1, int((run.place / f"told-{rank}").read_text()) + 1)
        assert [events[f"{rank} tells {number}"] for number in told] == [1] * len(told)
        missing = [number for number in told if not lines[rank, f"line {number}"]]
        assert not missing, f"lines of rank {rank} are missing: {missing}"


def test_whatever_relay_is_killed_nothing_is_lost_and_the_run_ends_with_nothing_left(start_run: StartRun) -> None:
    run = start_run("relayed", rank_function="teller:run_rank", relays=TWO_LEVELS, recovery={"standby": False})
    run.wait_step(5)
    run.wait(lambda: len(_relays(run)) == 3, "two relays and one above them")
    _wait_for_parcels(run, 2)
    _kill(run, "0-1")
    _kill(run, "1-0")
    (run.place / "finish").touch()
    status = run.wait_end()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    assert any("reporting directly: the relay does not answer" in line.text for line in run.reader.logs())
    _assert_all_is_written(run)
    run.assert_nothing_left()
