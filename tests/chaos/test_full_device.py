"""A device that is full in every attempt: the rank that is named, and when the run ends."""

from __future__ import annotations

import pytest
from laptop import EVERY, Laptop, wait_for

from raypp.train.fault_injection import VARIABLE

pytestmark = pytest.mark.timeout(300)


@pytest.mark.gate
def test_a_device_that_is_full_at_the_same_step_again_ends_the_run_and_names_its_rank(laptop: Laptop) -> None:
    fault = f"oom@forward:rank=1,step={EVERY + 1},attempt=0"  # attempt 0: every one
    run = laptop.start(laptop.job("full", resources__env={VARIABLE: fault}), "--json")
    assert run.wait() == 1, run.told()
    status = run.status()
    assert (status["state"], status["restarts"]) == ("FAILED", 1)
    first = status["error"].splitlines()[0]
    assert "rank 1 (pp1)" in first and "out of device memory: OutOfMemoryError: injected at forward" in first, status[
        "error"
    ]
    assert "planned: " in status["error"] and "twice in a row" in status["error"]
    failed = run.events("rank_failed")
    assert {event.details["kind"] for event in failed if event.rank == 1} == {"device_out_of_memory"}
    assert {event.details["kind"] for event in failed if event.rank != 1} <= {"lost_peer"}
    assert wait_for(lambda: not laptop.workers(), "the end of every rank")
