"""Tests complete lives of ranks whose saves take longer than the steps between them."""

from pathlib import Path
from typing import Any

import pytest
from collecting_reporter import CollectingReporter
from harness import run_in_turn, run_ranks
from training import document

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.records import Requests
from raypp.state.checkpoint.commit import list_checkpoints, read_commit
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.storage.directory import DirectoryStore

STEPS = 8


def life(
    rank: int, world: int, port: int, job: dict[str, Any], stop_at: int = 99, save_at: int = 0
) -> tuple[int | None, list[Any]]:
    reported, parsed = (
        CollectingReporter(lambda asked: Requests(stop=asked >= stop_at, save=asked == save_at)),
        parse_job(job),
    )
    result = run_rank(decide(parsed), local_seat(rank, world, port, parsed), reported)
    return result.checkpoint_step, [(event.kind, event.step, event.details) for event in reported.events]


def slow_saves(root: Path, if_busy: str, mbps: float = 10) -> dict[str, Any]:
    """Returns a job whose saves take about half a second at 10 Mbit/s, and whose steps far less."""
    checkpoint = {
        "url": str(root), "every_steps": 1, "keep": 99, "if_busy": if_busy, "max_upload_mbps": mbps,
        "memory_tier": False,
    }  # fmt: skip
    return document(pp=2, microbatches=4, train={"steps": STEPS}, checkpoint=checkpoint)


def steps_of(events: list[Any], kind: str) -> list[int]:
    return [step for of, step, _ in events if of == kind]


def test_skipped_saves_are_skipped_by_all_ranks_alike_and_the_last_one_never(tmp_path: Path) -> None:
    results = run_ranks(2, life, slow_saves(tmp_path, "skip"))
    assert [committed for committed, _ in results] == [STEPS, STEPS]
    events = results[0][1]
    skipped, committed = steps_of(events, "save_skipped"), steps_of(events, "committed")
    assert skipped and committed[0] == 1
    assert sorted(skipped + committed) == list(range(1, STEPS + 1))
    assert "save_waited" not in [kind for kind, step, _ in events if step != STEPS]
    store = DirectoryStore(tmp_path)
    assert [checkpoint.step for checkpoint in list_checkpoints(store, "numbers")] == committed
    for step in committed:
        assert len(read_commit(store, "numbers", step).objects) == 2
        assert verify_checkpoint(store, "numbers", step) == []
    for kind, _, details in events:
        if kind == "committed":
            assert {"upload_mb_per_s", "stall_s", "upload_s"} <= details.keys()


@pytest.mark.gate
def test_by_default_training_waits_and_says_so(tmp_path: Path) -> None:
    results = run_ranks(2, life, slow_saves(tmp_path, "wait", mbps=3), 3)
    assert [committed for committed, _ in results] == [2, 2], "stopped before step 3, with a save"
    events = results[0][1]
    assert steps_of(events, "committed") == [1, 2]
    assert steps_of(events, "save_waited") == [2]
    assert steps_of(events, "save_skipped") == []


@pytest.mark.gate
def test_the_save_before_a_stop_is_not_skipped(tmp_path: Path) -> None:
    results = run_ranks(2, life, slow_saves(tmp_path, "skip"), 4)
    assert [committed for committed, _ in results] == [3, 3]
    assert steps_of(results[0][1], "committed") == [1, 3]


def test_a_save_that_is_asked_for_before_the_first_step_is_made_after_it(tmp_path: Path) -> None:
    job = document(pp=2, checkpoint={"url": str(tmp_path), "every_steps": 0, "memory_tier": False})
    lives = [({**job, "train": {**job["train"], "steps": steps}}, 99, 1) for steps in (3, 5)]
    found = [steps_of(first[1], "committed") for first, _ in run_in_turn(2, life, lives)]
    assert found == [[1, 3], [4, 5]]
