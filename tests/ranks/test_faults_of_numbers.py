"""Tests the reports of NaN, corrupt weights and slow ranks: real ranks, injected faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lives import Lives, Told, same
from training import document

from raypp.checkpoint.commit import list_checkpoints


def _document(steps: int, mesh: dict[str, int], **recovery: Any) -> dict[str, Any]:
    microbatches = 2 * mesh.get("dp_replicate", 1)
    return document(
        name="faulty", layers=2, microbatches=microbatches, pipeline={"lookahead": 0}, train={"steps": steps},
        checkpoint={"memory_tier": False}, recovery=recovery, **mesh,
    )  # fmt: skip


def _live(place: Path, document: dict[str, Any], faults: str) -> tuple[Told, Lives]:
    lives = Lives(document, place, [place] * 2, [0, 0], {"RAYPP_FAULTS": faults} if faults else None)
    return lives.attempt_once(), lives


def test_a_step_with_nan_is_skipped_and_traced_to_its_stage(tmp_path: Path) -> None:
    told, _ = _live(tmp_path, _document(5, {"pp": 2}), "nan@forward:rank=1,step=3")
    assert sorted(told.results) == [0, 1], told.errors
    (skipped,) = told.of_kind("step_skipped")
    assert skipped.step == 3
    assert "the loss is nan" in skipped.message and "first in the output of the stage" in skipped.message
    assert "microbatch 0 of stage 1 on rank 1 (pp1)" in skipped.message
    assert [step for step, loss in told.losses.items() if not math.isfinite(loss)] == [3]


@pytest.mark.slow
def test_a_rank_that_stays_slow_is_told_once(tmp_path: Path) -> None:
    told, _ = _live(tmp_path, _document(27, {"pp": 2}), "slow@forward:rank=1,step=4,seconds=0.2")
    (slow,) = told.of_kind("straggler")
    assert slow.rank == 1 and "pp1 (rank 1) computes" in slow.message


SLOW = [pytest.mark.slow, pytest.mark.gate]


@pytest.mark.parametrize(
    ("mesh", "recovery", "fault", "begin", "words"),
    [
        pytest.param(
            {"pp": 2}, {"on_nonfinite": "stop"}, "nan@backward:rank=0,step=2",
            "NonFiniteError: step 2: the gradients of model.embed_tokens.weight",
            ["did not recur", "recovery.on_nonfinite: stop"], marks=SLOW, id="gradients",
        ),
        pytest.param(
            {"pp": 2}, {}, "nan@optimizer:rank=1,step=2", "BrokenWeightsError: step 3: the loss is nan",
            ["weights are not finite"], marks=SLOW, id="weights",
        ),
        pytest.param(
            {"dp_replicate": 2}, {}, "corrupt@optimizer:rank=1,step=2",
            "ReplicasDifferError: weights that must be bit-identical differ",
            ["rank 0 (pp0-dp0), rank 1 (pp0-dp1) differ, and it is unknown which is right"], id="one bit of a replica",
        ),
    ],
)  # fmt: skip
def test_what_broke_is_told_on_all_ranks_and_never_committed(
    mesh: dict[str, int], recovery: dict[str, Any], fault: str, begin: str, words: list[str], tmp_path: Path
) -> None:
    told, lives = _live(tmp_path, _document(4, mesh, **recovery), fault)
    assert sorted(told.errors) == [0, 1]
    for error in told.errors.values():
        assert error.startswith(begin) and all(one in error for one in words), error
    assert not list_checkpoints(lives.store, "faulty")


def test_a_rank_whose_device_is_full_says_so_although_torch_wraps_the_error(tmp_path: Path) -> None:
    told, _ = _live(tmp_path, _document(4, {"pp": 2}), "oom@forward:rank=1,step=2")
    first, *details = told.errors[1].splitlines()
    assert first.startswith("DeviceMemoryError: out of device memory: OutOfMemoryError: "), told.errors
    assert any(line.startswith("planned: ") and "in flight" in line for line in details), details
    assert told.errors[0].startswith("LostPeerError") or "lost a peer" in told.errors[0], told.errors


@pytest.mark.slow
def test_tied_ends_that_differ_are_found_and_looking_for_them_changes_no_bit(tmp_path: Path) -> None:
    document = _document(4, {"pp": 2})
    document["model"]["tie_embeddings"] = True
    told, _ = _live(tmp_path / "bad", document, "corrupt@optimizer:rank=0,step=2")
    assert all("model.embed_tokens.weight" in error for error in told.errors.values()) and len(told.errors) == 2
    _, looked = _live(tmp_path / "looked", document, "")
    document["recovery"] = {"check_replicas": False, "straggler_factor": 0}
    _, blind = _live(tmp_path / "blind", document, "")
    assert same(looked.final_state(), blind.final_state())
