"""Scalings that depend on the length of a document, and layers without experts, on every mesh.

Documents have 3 to 50 tokens, so some are within the original context of 16 and some are longer.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from small_models import small_options
from training import Batch, InBothTypes, thinned

pytestmark = pytest.mark.ranks
STEPS = 2
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
MODELS: dict[str, dict[str, Any]] = {
    "dynamic": {"kind": "llama", "rope": {"kind": "dynamic", "factor": 4.0, "original_context": 16}},
    "longrope": {"kind": "llama", "rope": {"kind": "longrope", "factor": 4.0, "original_context": 16, **LONGROPE}},
    "dense layers": {"kind": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "shared expert": {"kind": "qwen2_moe", "mlp_only_layers": [2]},
}
SPREAD: dict[str, dict[str, Any]] = {
    "dynamic": {"cp": 2},
    "longrope": {"cp": 2, "cp_style": "ulysses"},
    "dense layers": {"fsdp": 2, "ep": 2},
    "shared expert": {"fsdp": 2, "ep": 2},
}


def job(name: str, **mesh: Any) -> dict[str, Any]:
    changed = dict(MODELS[name])
    options = small_options(changed.pop("kind"), num_layers=4)
    return {
        "name": "rotary",
        "model": {**options.model_dump(mode="json", exclude_none=True), **changed},
        "data": {"kind": "synthetic", "num_documents": 100, "document_len": [3, 50], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"microbatches": 4 // mesh.get("fsdp", 1), "pad_to_multiple_of": 8},
        "train": {"steps": STEPS, "micro_batch_size": 2, "optimizer": {"kind": "adamw", "lr": 3e-3}},
    }


ONE = Batch(1, {name: job(name) for name in MODELS}, STEPS)
PIPELINE = Batch(2, {name: job(name, pp=2) for name in MODELS}, STEPS)
SUMS_OF_ONE = InBothTypes(1, {name: job(name) for name in MODELS}, STEPS)
SUMS = InBothTypes(2, {name: job(name, **SPREAD[name]) for name in MODELS}, STEPS)


@pytest.mark.parametrize("name", thinned(MODELS, ["dense layers"]))
def test_a_pipeline_gives_the_bits_of_one_process(name: str) -> None:
    assert_identical(PIPELINE[name], ONE[name])


@pytest.mark.parametrize("name", thinned(MODELS, ["dynamic"], ["longrope"]))
def test_shared_rows_and_experts_add_up_what_one_process_does(name: str) -> None:
    assert_same_sums(SUMS.numbers(name), SUMS_OF_ONE.numbers(name))


def test_a_scaling_changes_the_numbers() -> None:
    assert ONE["dynamic"]["loss"] != ONE["longrope"]["loss"]
