"""A rank is frozen: it neither works nor dies, so only the controller's watchdog can detect it."""

from __future__ import annotations

import json

import pytest
from held_back import held_back
from laptop import EVERY, STEPS, Laptop, Run, assert_same_weights, numbers

pytestmark = pytest.mark.timeout(600)


@pytest.mark.gate
def test_a_frozen_rank_is_named_and_the_run_ends_as_if_nothing_had_been(laptop: Laptop, undisturbed: Run) -> None:
    run = laptop.start(laptop.job("frozen", recovery__hang_timeout_s=6), "--json")
    ranks = run.wait_titles()
    with held_back([rank.pid for rank in ranks.values()], pause_s=0.05):
        run.wait_step(EVERY)
    ranks["pp1"].suspend()
    assert run.wait() == 0, run.told()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["step"], answer["restarts"]) == ("SUCCEEDED", STEPS, 1)
    failure = run.events("rank_failed")[0]
    assert (failure.details["kind"], failure.details["label"]) == ("hung", "pp1")
    assert "pp0: `step" in failure.details["evidence"]
    assert "has not reported for" in failure.details["cause"]
    stacks = {event.rank: event.details["stacks"] for event in run.events("stacks")}
    assert "runtime.py" in stacks[0] or "distributed" in stacks[0], stacks
    assert "process state: stopped" in stacks[1], stacks
    assert numbers(run.history()) == numbers(undisturbed.history())
    assert_same_weights(run.weights(), undisturbed.weights())
