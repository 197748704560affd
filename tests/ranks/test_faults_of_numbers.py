"""Tests the reports of NaN, corrupt weights and slow ranks: real ranks, injected faults."""

import math
from pathlib import Path
from typing import Any

import pytest
from local_run import AttemptReports, LocalRun, same
from training import document

from raypp.state.checkpoint.commit import list_checkpoints


def _document(steps: int, mesh: dict[str, int], **recovery: Any) -> dict[str, Any]:
    microbatches = 2 * mesh.get("dp_replicate", 1)
    return document(
        name="faulty", layers=2, microbatches=microbatches, pipeline={"lookahead": 0}, train={"steps": steps},
        checkpoint={"memory_tier": False}, recovery=recovery, **mesh,
    )  # fmt: skip


def _live(place: Path, document: dict[str, Any], faults: str) -> tuple[AttemptReports, LocalRun]:
    run = LocalRun(document, place, [place] * 2, [0, 0], {"RAYPP_FAULTS": faults} if faults else None)
    return run.attempt_once(), run


def test_a_step_with_nan_is_skipped_and_traced_to_its_stage(tmp_path: Path) -> None:
    reported, _ = _live(tmp_path, _document(5, {"pp": 2}), "nan@forward:rank=1,step=3")
    assert sorted(reported.results) == [0, 1], reported.errors
    (skipped,) = reported.of_kind("step_skipped")
    assert skipped.step == 3
    assert "the loss is nan" in skipped.message and "first in the output of the stage" in skipped.message
    assert "microbatch 0 of stage 1 on rank 1 (pp1)" in skipped.message
    assert [step for step, loss in reported.losses.items() if not math.isfinite(loss)] == [3]


@pytest.mark.slow
def test_a_rank_that_stays_slow_is_reported_once(tmp_path: Path) -> None:
    reported, _ = _live(tmp_path, _document(27, {"pp": 2}), "slow@forward:rank=1,step=4,seconds=0.2")
    (slow,) = reported.of_kind("straggler")
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
def test_what_broke_is_reported_on_all_ranks_and_never_committed(
    mesh: dict[str, int], recovery: dict[str, Any], fault: str, begin: str, words: list[str], tmp_path: Path
) -> None:
    reported, run = _live(tmp_path, _document(4, mesh, **recovery), fault)
    assert sorted(reported.errors) == [0, 1]
    for error in reported.errors.values():
        assert error.startswith(begin) and all(one in error for one in words), error
    assert not list_checkpoints(run.store, "faulty")


def test_a_rank_whose_device_is_full_says_so_although_torch_wraps_the_error(tmp_path: Path) -> None:
    reported, _ = _live(tmp_path, _document(4, {"pp": 2}), "oom@forward:rank=1,step=2")
    first, *details = reported.errors[1].splitlines()
    assert first.startswith("DeviceMemoryError: out of device memory: OutOfMemoryError: "), reported.errors
    assert any(line.startswith("planned: ") and "in flight" in line for line in details), details
    assert reported.errors[0].startswith("LostPeerError") or "lost a peer" in reported.errors[0], reported.errors


@pytest.mark.slow
def test_tied_ends_that_differ_are_found_and_looking_for_them_changes_no_bit(tmp_path: Path) -> None:
    document = _document(4, {"pp": 2})
    document["model"]["tie_embeddings"] = True
    reported, _ = _live(tmp_path / "bad", document, "corrupt@optimizer:rank=0,step=2")
    assert all("model.embed_tokens.weight" in error for error in reported.errors.values()) and len(reported.errors) == 2
    _, looked = _live(tmp_path / "looked", document, "")
    document["recovery"] = {"check_replicas": False, "straggler_factor": 0}
    _, blind = _live(tmp_path / "blind", document, "")
    assert same(looked.final_state(), blind.final_state())


@pytest.mark.slow
@pytest.mark.gate
def test_a_spike_is_skipped_alike_on_another_mesh_and_after_a_restart(tmp_path: Path) -> None:
    finals = []
    for place, mesh, faults in (
        ("one", {}, "spike@forward:rank=0,step=8"),
        ("two", {"pp": 2}, "spike@forward:rank=1,step=8"),
        ("again", {"pp": 2}, "spike@forward:rank=1,step=8,attempt=0; raise@forward:rank=0,step=7"),
    ):
        document = _document(10, mesh, on_spike="skip", spike_factor=20)
        document["checkpoint"]["every_steps"] = 3
        root, ranks = tmp_path / place, mesh.get("pp", 1)
        run = LocalRun(document, root, [root] * ranks, [0] * ranks, {"RAYPP_FAULTS": faults})
        reported = run.attempt_once()
        if place == "again":
            assert reported.errors
            reported = run.attempt_once()
        (skipped,) = reported.of_kind("step_skipped")
        assert skipped.step == 8 and "times the recent median" in skipped.message
        finals.append(run.final_state())
    assert same(finals[0], finals[1]) and same(finals[1], finals[2])


@pytest.mark.slow
@pytest.mark.gate
def test_a_spike_stops_the_run_before_its_update_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    document = _document(9, {}, on_spike="stop", spike_factor=20)
    document["checkpoint"] |= {"every_steps": 2, "keep": 1, "best": {"keep": 1}}
    document["data"]["eval"] = {"fraction": 0.2}
    document["train"] |= {"eval_every_steps": 2, "optimizer": {"lr": 0.0}}
    run = LocalRun(document, tmp_path, [tmp_path], [0], {"RAYPP_FAULTS": "spike@forward:rank=0,step=8"})
    reported = run.attempt_once()
    assert reported.errors[0].startswith("SpikeError: step 8: the loss is ") and "on_spike: stop" in reported.errors[0]
    assert [one.step for one in list_checkpoints(run.store, "faulty")] == [2, 6], "of equal ones the first is the best"
