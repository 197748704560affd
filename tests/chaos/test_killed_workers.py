"""Kills a rank with `kill -9` at every moment of a run's life: the result must equal that of an
undisturbed run."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
import pytest
from held_back import held_back
from laptop import EVERY, STEPS, Laptop, Run

pytestmark = pytest.mark.timeout(600)

MOMENTS = ("before the first step", "while training", "while a save is under way", "while the next attempt loads")


@dataclass
class Kill:
    """A killed rank, and how the run recovered."""

    moment: str
    label: str
    pid: int
    at: float
    seconds: dict[str, float] = field(default_factory=dict)


class Killer:
    """Kills one rank of a run at moments detected from outside."""

    def __init__(self, run: Run, victim: str) -> None:
        self.run, self.victim = run, victim
        self.attempts: list[dict[str, psutil.Process]] = []
        self.kills: list[Kill] = []

    def new_attempt(self) -> dict[str, psutil.Process]:
        """Waits for the next attempt and returns its ranks, with their seats from the records."""
        self.attempts.append(self.run.wait_seats(len(self.attempts) + 1))
        return self.attempts[-1]

    def kill(self, moment: str, ranks: dict[str, psutil.Process]) -> None:
        at = time.time()
        ranks[self.victim].kill()
        self.kills.append(Kill(moment, self.victim, ranks[self.victim].pid, at))

    def before_the_first_step(self, ranks: dict[str, psutil.Process]) -> None:
        assert not self.run.history()
        self.kill(MOMENTS[0], ranks)

    def while_training(self, ranks: dict[str, psutil.Process]) -> None:
        with held_back(_pids(ranks), pause_s=0.05):
            self.run.until(lambda: self.run.commits(), "a commit")
            self.run.wait_step(EVERY + 2)
            self.kill(MOMENTS[1], ranks)

    def while_saving(self, ranks: dict[str, psutil.Process]) -> None:
        """The store is frozen while the next save is under way. The victim has sent its part."""
        laptop, before = self.run.laptop, self.run.commits()[-1]
        with contextlib.ExitStack() as frozen:
            with held_back(_pids(ranks), pause_s=0.05):
                self.run.until(lambda: self.run.commits()[-1] > before, "another commit")
                frozen.enter_context(laptop.frozen_store())
            self.run.until(lambda: laptop.asks_frozen_store(ranks[self.victim]), "a save that waits for the store")
            self.kill(MOMENTS[2], ranks)
            ranks[self.victim].wait(10)

    def while_loading(self, ranks: dict[str, psutil.Process]) -> None:
        """Rank 0 waits for the store: the attempt is claimed before the ranks get their seats, so
        it asks for the checkpoint to start from."""
        laptop = self.run.laptop
        with laptop.frozen_store():
            self.run.until(lambda: laptop.asks_frozen_store(ranks["pp0"]), "a rank that loads")
            self.kill(MOMENTS[3], ranks)
            ranks[self.victim].wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("pp0", id="first stage"), pytest.param("pp1", id="last stage")])
def test_a_rank_killed_at_every_moment_changes_nothing_but_the_time(
    laptop: Laptop, undisturbed: Run, victim: str, record_property: Any
) -> None:
    assert not laptop.workers()
    run = laptop.start(laptop.job(f"kill-{victim}", recovery={"max_restarts": 3}), "--json")
    killer = Killer(run, victim)
    run.wait_titles()[victim].suspend()  # no step ends before the seats are in the records
    killer.before_the_first_step(killer.new_attempt())
    second = killer.new_attempt()
    killer.while_training(second)
    third = killer.new_attempt()
    killer.while_saving(third)
    killer.while_loading(killer.new_attempt())

    assert run.wait() == 0, run.told()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["step"], answer["restarts"]) == ("SUCCEEDED", STEPS, len(MOMENTS))
    run.assert_like(undisturbed)
    _assert_told(run, killer.kills)
    survivor = "pp1" if victim == "pp0" else "pp0"
    for before, after in pairwise(killer.attempts[:3]):
        assert after[survivor].pid == before[survivor].pid, "the rank that was not killed lost its process"
        assert after[victim].pid != before[victim].pid
    laptop.assert_nothing_lives(run.name)
    record_property("kills", [vars(kill) for kill in killer.kills])
    for kill in killer.kills:
        print(f"{kill.label} {kill.moment}: " + ", ".join(f"{what} {s:.2f} s" for what, s in kill.seconds.items()))


@pytest.mark.slow
def test_the_middle_of_three_stages_is_killed_and_the_others_keep_their_processes(
    laptop: Laptop, undisturbed: Run
) -> None:
    run = laptop.start(laptop.job("middle", mesh={"pp": 3}), "--json")
    before = run.wait_seats(1, 3)
    with held_back(_pids(before), pause_s=0.05):
        run.wait_step(EVERY + 2)
        before["pp1"].kill()
    after = run.wait_seats(2, 3)
    assert [after[label].pid == before[label].pid for label in ("pp0", "pp1", "pp2")] == [True, False, True]
    assert run.wait() == 0, run.told()
    run.assert_like(undisturbed)
    laptop.assert_nothing_lives(run.name)


def _pids(ranks: dict[str, psutil.Process]) -> list[int]:
    return [rank.pid for rank in ranks.values()]


def _assert_told(run: Run, kills: list[Kill]) -> None:
    """Asserts that each kill is told with rank, node and cause, and followed by a restart."""
    failed = {event.details["pid"]: event for event in run.events("rank_failed") if event.details["kind"] == "killed"}
    assert failed.keys() == {kill.pid for kill in kills}
    restarts = run.events("restarting")
    assert len(restarts) == len(kills)
    for number, kill in enumerate(kills, start=1):
        event = failed[kill.pid]
        assert (event.attempt, event.rank, event.node) == (number, int(kill.label[2:]), "127.0.0.1")
        assert f"pid {kill.pid}" in event.details["cause"] and kill.label in restarts[number - 1].message
        kill.seconds["known"] = event.time - kill.at
        kill.seconds["seats"] = _first(run, "seated", number + 1) - kill.at
        if any(one.attempt == number + 1 for one in run.events("first_step")):
            kill.seconds["next step"] = _first(run, "first_step", number + 1) - kill.at
    assert f"pid {kills[-1].pid}" in run.status()["error"]


def _first(run: Run, kind: str, attempt: int) -> float:
    return min(event.time for event in run.events(kind) if event.attempt == attempt)


@pytest.mark.slow
def test_a_run_whose_rank_always_dies_before_any_progress_fails_and_says_why(laptop: Laptop) -> None:
    run = laptop.start(laptop.job("hopeless", recovery={"max_restarts": 1}), "--json")
    killer = Killer(run, "pp1")
    for _ in range(2):
        killer.before_the_first_step(killer.new_attempt())
    assert run.wait() == 1, run.told()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["step"], answer["restarts"], answer["checkpoint"]) == ("FAILED", 0, 1, None)
    error = run.status()["error"]
    assert "recovery.max_restarts" in error and "rank 1 (pp1)" in error and f"pid {killer.kills[-1].pid}" in error
    assert error in laptop.raypp("status", "hopeless", "--json").json()["error"]
    assert "recovery.max_restarts" in run.err and "Traceback" not in run.err
    laptop.assert_nothing_lives(run.name)
