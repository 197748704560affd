"""Tests the reports of NaN, corrupt weights and slow ranks: real ranks, injected faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lives import Lives, Told, same

from raypp.checkpoint.commit import list_checkpoints

pytestmark = pytest.mark.ranks


def _document(steps: int, mesh: dict[str, int], **recovery: Any) -> dict[str, Any]:
    return {
        "name": "faulty",
        "model": {
            "kind": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 32, "vocab_size": 64,
        },
        "data": {"kind": "synthetic", "num_documents": 100, "document_len": [3, 20], "seq_len": 32},
        "mesh": mesh,
        "pipeline": {"schedule": "1f1b", "microbatches": 2, "lookahead": 0},
        "train": {"steps": steps, "micro_batch_size": 1, "optimizer": {"kind": "adamw", "lr": 3e-3}},
        "checkpoint": {"memory_tier": False},
        "recovery": recovery,
    }  # fmt: skip


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


@pytest.mark.slow
@pytest.mark.gate
def test_gradients_that_break_once_are_told_as_an_error_of_the_machine_and_the_job_may_want_a_stop(
    tmp_path: Path,
) -> None:
    told, _ = _live(tmp_path, _document(4, {"pp": 2}, on_nonfinite="stop"), "nan@backward:rank=0,step=2")
    assert sorted(told.errors) == [0, 1]
    for error in told.errors.values():
        assert error.startswith("NonFiniteError: step 2: the gradients of model.embed_tokens.weight"), error
        assert "did not recur" in error and "recovery.on_nonfinite: stop" in error


@pytest.mark.slow
@pytest.mark.gate
def test_weights_that_an_update_broke_are_told_as_that(tmp_path: Path) -> None:
    told, _ = _live(tmp_path, _document(4, {"pp": 2}), "nan@optimizer:rank=1,step=2")
    assert sorted(told.errors) == [0, 1]
    for error in told.errors.values():
        assert error.startswith("BrokenWeightsError: step 3: the loss is nan") and "weights are not finite" in error


def test_replicas_that_differ_by_one_bit_are_named_and_never_committed(tmp_path: Path) -> None:
    told, lives = _live(tmp_path, _document(4, {"dp_replicate": 2}), "corrupt@optimizer:rank=1,step=2")
    assert sorted(told.errors) == [0, 1]
    for error in told.errors.values():
        assert error.startswith("ReplicasDifferError: weights that must be bit-identical differ"), error
        assert "rank 0 (pp0-dp0), rank 1 (pp0-dp1) differ, and it is unknown which is right" in error
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
