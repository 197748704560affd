"""Adapters on a quantised base: no mesh, cut or schedule changes its bytes, nor what is trained.

The reference is one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from training import Batch, InBothTypes, Numbers, thinned

from raypp.models.quantised_rows import quantise_rows

pytestmark = pytest.mark.ranks

STEPS = 3


def document(base: str = "nf4", kind: str = "llama", schedule: str = "1f1b", **sections: Any) -> dict[str, Any]:
    mesh = sections.get("mesh", {})
    replicas = mesh.get("fsdp", 1) * mesh.get("dp_replicate", 1)
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64, "aux_loss_weight": 0.02}
    return {
        "name": "quantised",
        "model": {
            "kind": kind, "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128,
            "vocab_size": 96, **(experts if kind == "qwen3_moe" else {}),
            "lora": {"rank": 4, "alpha": 64, "base": base},
        },
        "data": {"kind": "synthetic", "num_documents": 400, "document_len": [3, 50], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"schedule": schedule, "microbatches": 8 // replicas, **sections.get("pipeline", {})},
        "train": {
            "steps": STEPS, "micro_batch_size": 2, "seed": 3, "optimizer": {"kind": "adamw", "lr": 1e-2},
            **sections.get("train", {}),
        },
    }  # fmt: skip


def pipeline(base: str = "nf4", kind: str = "llama", schedule: str = "1f1b", **sections: Any) -> dict[str, Any]:
    stages = 1 if schedule == "1f1b" else 2
    return document(base, kind, schedule, mesh={"pp": 2}, pipeline={"stages_per_rank": stages}, **sections)


BF16 = {"train": {"precision": "bf16"}}
ONE = Batch(
    1,
    {
        "nf4": document(),
        "int8": document("int8"),
        "experts": document(kind="qwen3_moe"),
        "bf16": document(**BF16),
        "fp32": document("fp32"),
    },
    STEPS,
)
PIPELINES = Batch(
    2,
    {
        ("nf4", "1f1b"): pipeline(),
        ("nf4", "interleaved_zero_bubble"): pipeline(schedule="interleaved_zero_bubble"),
        ("nf4", "recomputed"): pipeline(train={"activation_checkpointing": "full"}),
        ("nf4", "recomputed selectively"): pipeline(train={"activation_checkpointing": "selective"}),
        ("int8", "zbv"): pipeline("int8", schedule="zbv"),
        ("experts", "1f1b"): pipeline(kind="qwen3_moe"),
        ("bf16", "1f1b"): pipeline(**BF16),
        ("bf16", "weights freed after use"): document(mesh={"pp": 2, "reshard_after_forward": True}, **BF16),
    },
    STEPS,
)


@pytest.mark.parametrize(
    ("model", "way"),
    thinned(PIPELINES.jobs, [("int8", "zbv")], [("bf16", "weights freed after use")]),
)
def test_a_pipeline_gives_the_bits_of_one_process(model: str, way: str) -> None:
    found, reference = PIPELINES[model, way], ONE[model]
    assert_identical(found, reference)
    assert set(found["gradients"][0]) == {name for name in reference["weights"] if ".lora_" in name}


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_the_base_holds_the_rows_of_the_drawn_weights(base: str) -> None:
    whole = ONE["fp32"]["weights"]
    stored = {name: value for name, value in ONE[base]["weights"].items() if value.dtype == torch.uint8}
    assert len(stored) == 4 * 7  # layers and their matrices
    assert all(torch.equal(value, quantise_rows(whole[name], base)) for name, value in stored.items())
    others = [name for name in whole if name not in stored and ".lora_" not in name]
    assert all(torch.equal(ONE[base]["weights"][name], whole[name]) for name in others)


def test_other_frozen_weights_have_the_compute_dtype() -> None:
    dtypes = {name: value.dtype for name, value in ONE["bf16"]["weights"].items()}
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.bfloat16
    assert {dtype for name, dtype in dtypes.items() if ".lora_" in name} == {torch.float32}


SUMS_OF_ONE = InBothTypes(
    1, {"nf4": document(), "int8": document("int8"), "experts": document(kind="qwen3_moe")}, STEPS
)
SUMS = InBothTypes(
    2,
    {
        ("nf4", "reshard"): document(mesh={"fsdp": 2, "reshard_after_forward": True}),
        ("nf4", "dp_replicate"): document(mesh={"dp_replicate": 2}),
        ("int8", "fsdp, recomputed"): document(
            "int8", mesh={"fsdp": 2}, train={"activation_checkpointing": "full"}
        ),
        ("experts", "ep"): document(kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
    },
    STEPS,
)  # fmt: skip
SUMS_OF_FOUR = InBothTypes(
    4,
    {
        ("nf4", "pp and fsdp"): document(mesh={"pp": 2, "fsdp": 2}),
        ("experts", "fsdp and ep"): document(kind="qwen3_moe", mesh={"fsdp": 4, "ep": 2}),
    },
    STEPS,
)


def assert_same(found: Numbers, reference: Numbers) -> None:
    """Asserts that the bytes of the base are equal, and the sums of all else."""
    for mine, theirs in zip(found, reference, strict=True):
        stored = [name for name, value in theirs["weights"].items() if value.dtype == torch.uint8]
        assert stored
        assert all(torch.equal(mine["weights"][name], theirs["weights"][name]) for name in stored)
    assert_same_sums(without_base(found), without_base(reference))


def without_base(numbers: Numbers) -> Numbers:
    def others(result: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in result["weights"].items() if value.dtype != torch.uint8}
        return {**result, "weights": kept}

    return Numbers(*map(others, numbers))


@pytest.mark.parametrize(("model", "way"), thinned(SUMS.jobs, [], [("int8", "fsdp, recomputed")]))
def test_ranks_that_share_a_step_add_the_same_gradients(model: str, way: str) -> None:
    assert_same(SUMS.numbers((model, way)), SUMS_OF_ONE.numbers(model))


@pytest.mark.parametrize(("model", "way"), thinned(SUMS_OF_FOUR.jobs, [], [("nf4", "pp and fsdp")]))
def test_four_ranks_add_the_same_gradients(model: str, way: str) -> None:
    assert_same(SUMS_OF_FOUR.numbers((model, way)), SUMS_OF_ONE.numbers(model))
