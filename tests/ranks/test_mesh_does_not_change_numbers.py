"""The gate: the mesh does not change the numbers. The reference is always one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from own_schedule import backwards_in_pairs
from training import merged, train_steps

pytestmark = pytest.mark.ranks

STEPS = 3


def document(
    *, pp: int = 1, fsdp: int = 1, dp_replicate: int = 1, microbatches: int = 8, schedule: str = "1f1b", **other: Any
) -> dict[str, Any]:
    pipeline = {
        "schedule": schedule,
        "microbatches": microbatches,
        "pad_to_multiple_of": 8,
        **other.pop("pipeline", {}),
    }
    train = {
        "steps": STEPS, "micro_batch_size": 2, "seed": 3, "clip_norm": 0.05,
        "optimizer": {"kind": "adamw", "lr": 3e-3}, "lr_schedule": {"kind": "cosine", "warmup_steps": 1},
        **other.pop("train", {}),
    }  # fmt: skip
    return {
        "name": "numbers",
        "model": {
            "kind": "llama", "num_layers": 8, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
            "vocab_size": 96,
        },
        "data": {"kind": "synthetic", "num_documents": 400, "document_len": [3, 50], "seq_len": 64},
        "mesh": {"pp": pp, "fsdp": fsdp, "dp_replicate": dp_replicate},
        "pipeline": pipeline,
        "train": train,
        **other,
    }  # fmt: skip


@cache
def one_process(schedule: str = "1f1b", precision: str = "fp32", mode: str = "microbatch") -> dict[str, Any]:
    # A single stage: both schedules are then forwards and backwards in microbatch order.
    job = document(schedule=schedule, train={"precision": precision}, pipeline={"variable_seq_len": mode})
    return merged(run_ranks(1, train_steps, job, STEPS))


def assert_identical(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["loss"] == reference["loss"]
    assert found["tokens"] == reference["tokens"]
    assert found["grad_norm"] == reference["grad_norm"]
    assert found["extras"] == reference["extras"]
    for step, (ours, theirs) in enumerate(zip(found["gradients"], reference["gradients"], strict=True)):
        assert ours.keys() == theirs.keys()
        differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not differing, f"step {step + 1}: gradients differ: {differing}"
    assert all(torch.equal(found["weights"][name], value) for name, value in reference["weights"].items())


def assert_close(found: dict[str, Any], reference: dict[str, Any], relative: float) -> None:
    assert found["tokens"] == reference["tokens"]
    assert found["loss"] == pytest.approx(reference["loss"], rel=relative)
    assert found["grad_norm"] == pytest.approx(reference["grad_norm"], rel=relative)
    for ours, theirs in zip(found["extras"], reference["extras"], strict=True):
        assert ours == pytest.approx(theirs, rel=relative)
    for ours, theirs in zip(found["gradients"], reference["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            error = float((ours[name] - value).norm() / value.norm())
            assert error <= relative, f"{name}: {error:.1e}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_pipeline_gives_losses_gradients_and_weights_of_one_process_bit_for_bit(pp: int, schedule: str) -> None:
    found = merged(run_ranks(pp, train_steps, document(pp=pp, schedule=schedule), STEPS))
    assert_identical(found, one_process())


VIRTUAL = [
    ("interleaved_1f1b", 2, 2), ("interleaved_1f1b", 2, 4), ("looped_bfs", 2, 2), ("interleaved_zero_bubble", 2, 2),
    ("interleaved_zero_bubble", 3, 1), ("zbv", 2, 2), ("zbv", 3, 2), ("dualpipev", 2, 2), ("dualpipev", 3, 2),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "pp", "stages_per_rank"), VIRTUAL)
def test_virtual_stages_give_the_bits_of_one_process(schedule: str, pp: int, stages_per_rank: int) -> None:
    job = document(pp=pp, schedule=schedule, pipeline={"stages_per_rank": stages_per_rank})
    assert_identical(merged(run_ranks(pp, train_steps, job, STEPS)), one_process())


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_lookahead_gives_the_bits_of_one_process(schedule: str, stages_per_rank: int) -> None:
    job = document(pp=2, schedule=schedule, pipeline={"stages_per_rank": stages_per_rank, "lookahead": 2})
    assert_identical(merged(run_ranks(2, train_steps, job, STEPS)), one_process())


def test_a_schedule_of_ones_own_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    rows = backwards_in_pairs(2, 1, 8)
    table.write_text("".join(",".join(rows[rank]) + "\n" for rank in range(2)))
    for schedule in ("own_schedule:backwards_in_pairs", str(table)):
        found = merged(run_ranks(2, train_steps, document(pp=2, schedule=schedule), STEPS))
        assert_identical(found, one_process())


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_virtual_stages_that_are_sharded_give_the_numbers_of_one_process_within_1e5(schedule: str) -> None:
    job = document(pp=2, fsdp=2, microbatches=4, schedule=schedule, pipeline={"stages_per_rank": 2})
    assert_close(merged(run_ranks(4, train_steps, job, STEPS)), one_process(), 1e-5)


def test_an_uneven_cut_gives_the_same_bits() -> None:
    job = document(pp=3, pipeline={"layers_per_stage": [1, 5, 2]})
    assert_identical(merged(run_ranks(3, train_steps, job, STEPS)), one_process())


@pytest.mark.parametrize("mode", ["step", "off"])
def test_padding_more_than_needed_gives_the_bits_of_one_process_padded_alike(mode: str) -> None:
    job = document(pp=2, pipeline={"variable_seq_len": mode})
    assert_identical(merged(run_ranks(2, train_steps, job, STEPS)), one_process(mode=mode))


def test_recomputing_activations_gives_the_same_bits() -> None:
    job = document(pp=2, train={"activation_checkpointing": "full"})
    assert_identical(merged(run_ranks(2, train_steps, job, STEPS)), one_process())


# Sums over ranks are added in another order than over microbatches: a rounding of fp32 (6e-8) through three steps.
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2},
        {"dp_replicate": 2},
        {"pp": 2, "fsdp": 2},
        {"pp": 2, "dp_replicate": 2},
        {"dp_replicate": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_data_parallel_meshes_give_the_numbers_of_one_process_within_1e5(mesh: dict[str, int]) -> None:
    replicas = mesh.get("fsdp", 1) * mesh.get("dp_replicate", 1)
    world = replicas * mesh.get("pp", 1)
    job = document(**mesh, microbatches=8 // replicas)
    assert_close(merged(run_ranks(world, train_steps, job, STEPS)), one_process(), 1e-5)


def test_resharding_between_microbatches_changes_nothing() -> None:
    plain = document(fsdp=2, microbatches=4)
    resharded = document(fsdp=2, microbatches=4)
    resharded["mesh"]["reshard_after_forward"] = True
    assert_identical(
        merged(run_ranks(2, train_steps, resharded, STEPS)), merged(run_ranks(2, train_steps, plain, STEPS))
    )


def test_bf16_under_a_pipeline_gives_the_bits_of_one_process_in_bf16() -> None:
    # Activations cross in bf16, as they are computed: the cut rounds nothing that one process does not round.
    job = document(pp=2, train={"precision": "bf16"})
    assert_identical(merged(run_ranks(2, train_steps, job, STEPS)), one_process(precision="bf16"))


def test_gradients_summed_in_bf16_stay_near_those_summed_in_fp32() -> None:
    job = document(fsdp=2, microbatches=4, train={"precision": "bf16", "reduce_dtype": "bf16"})
    rough = merged(run_ranks(2, train_steps, job, STEPS))
    exact = one_process(precision="bf16")
    # bf16 keeps 8 bits, so a sum of 4 microbatches on 2 ranks is off by some 2^-9 of each gradient: 0.4 % measured.
    for name, value in exact["gradients"][0].items():
        error = float((rough["gradients"][0][name] - value).norm() / value.norm())
        assert error <= 2e-2, f"{name}: {error:.1e}"
    assert any(not torch.equal(rough["gradients"][0][name], value) for name, value in exact["gradients"][0].items()), (
        "the reduction was not in bf16"
    )
