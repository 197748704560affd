"""Adapters on a quantised base: no mesh, cut or schedule changes its bytes, nor what is trained.

The reference is one process.
"""

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from training import Numbers, numbers, thinned, trained
from training import document as small

from raypp.stages.models.quantised_rows import quantise_rows


def document(
    base: str = "nf4", kind: str = "llama", *, mesh: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64, "aux_loss_weight": 0.02}
    model = {
        "kind": kind, "hidden_size": 64, "ffn_size": 128, **(experts if kind == "qwen3_moe" else {}),
        "lora": {"rank": 4, "alpha": 64, "base": base},
    }  # fmt: skip
    train = {"optimizer": {"kind": "adamw", "lr": 1e-2}, **sections.pop("train", {})}
    return small(name="quantised", model=model, train=train, **(mesh or {}), **sections)


def pipeline(base: str = "nf4", kind: str = "llama", schedule: str = "1f1b", **sections: Any) -> dict[str, Any]:
    stages = {"stages_per_rank": 1 if schedule == "1f1b" else 2}
    return document(base, kind, schedule=schedule, mesh={"pp": 2}, pipeline=stages, **sections)


BF16 = {"train": {"precision": "bf16"}}
MODELS = {
    "nf4": document(),
    "int8": document("int8"),
    "experts": document(kind="qwen3_moe"),
    "bf16": document(**BF16),
    "fp32": document("fp32"),
}
PIPELINES = {
    ("nf4", "1f1b"): pipeline(),
    ("nf4", "interleaved_zero_bubble"): pipeline(schedule="interleaved_zero_bubble"),
    ("nf4", "recomputed"): pipeline(train={"activation_checkpointing": "full"}),
    ("nf4", "recomputed selectively"): pipeline(train={"activation_checkpointing": "selective"}),
    ("int8", "zbv"): pipeline("int8", schedule="zbv"),
    ("experts", "1f1b"): pipeline(kind="qwen3_moe"),
    ("bf16", "1f1b"): pipeline(**BF16),
    ("bf16", "weights freed after use"): document(mesh={"pp": 2, "reshard_after_forward": True}, **BF16),
}


@pytest.mark.parametrize(("model", "way"), thinned(PIPELINES, [("int8", "zbv")], [("bf16", "weights freed after use")]))
def test_a_pipeline_gives_the_bits_of_one_process(model: str, way: str) -> None:
    found, reference = trained(PIPELINES[model, way]), trained(MODELS[model])
    assert_identical(found, reference)
    assert set(found["gradients"][0]) == {name for name in reference["weights"] if ".lora_" in name}


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_the_base_holds_the_rows_of_the_drawn_weights(base: str) -> None:
    whole, quantised = (trained(MODELS[name])["weights"] for name in ("fp32", base))
    stored = {name: value for name, value in quantised.items() if value.dtype == torch.uint8}
    assert len(stored) == 4 * 7  # layers and their matrices
    assert all(torch.equal(value, quantise_rows(whole[name], base)) for name, value in stored.items())
    others = [name for name in whole if name not in stored and ".lora_" not in name]
    assert all(torch.equal(quantised[name], whole[name]) for name in others)


def test_other_frozen_weights_have_the_compute_dtype() -> None:
    dtypes = {name: value.dtype for name, value in trained(MODELS["bf16"])["weights"].items()}
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.bfloat16
    assert {dtype for name, dtype in dtypes.items() if ".lora_" in name} == {torch.float32}


SUMS = {
    ("nf4", "reshard"): document(mesh={"fsdp": 2, "reshard_after_forward": True}),
    ("nf4", "dp_replicate"): document(mesh={"dp_replicate": 2}),
    ("int8", "fsdp, recomputed"): document("int8", mesh={"fsdp": 2}, train={"activation_checkpointing": "full"}),
    ("experts", "ep"): document(kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
    ("nf4", "pp and fsdp"): document(mesh={"pp": 2, "fsdp": 2}),
    ("experts", "fsdp and ep"): document(kind="qwen3_moe", mesh={"fsdp": 4, "ep": 2}),
}


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


@pytest.mark.parametrize(("model", "way"), thinned(SUMS, [], [("nf4", "pp and fsdp")]))
def test_ranks_that_share_a_step_add_the_same_gradients(model: str, way: str) -> None:
    assert_same(numbers(SUMS[model, way]), numbers(MODELS[model]))
