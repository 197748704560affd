"""Every family trains on a mesh as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from small_models import small_options
from training import Batch, InBothTypes, thinned

from raypp.spec.families import FAMILIES

pytestmark = pytest.mark.ranks
STEPS = 2


def job(kind: str, **mesh: int) -> dict[str, Any]:
    return {
        "name": "families",
        "model": small_options(kind, num_layers=4).model_dump(mode="json", exclude_none=True),
        "data": {"kind": "synthetic", "num_documents": 100, "document_len": [3, 50], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"microbatches": 4 // mesh.get("fsdp", 1), "pad_to_multiple_of": 8},
        "train": {"steps": STEPS, "micro_batch_size": 2, "optimizer": {"kind": "adamw", "lr": 3e-3}},
    }


WITHOUT_EXPERTS = [kind for kind in FAMILIES if not hasattr(small_options(kind), "num_experts")]
"""`test_experts.py` has meshes of the others."""
QUICK = ["qwen3", "gemma3", "olmo2", "glm4", "starcoder2"]
"""Each has a part of layers that no family of `test_pairs_of_features.py` has."""
ONE = Batch(1, {kind: job(kind) for kind in FAMILIES}, STEPS)
PIPELINE = Batch(2, {kind: job(kind, pp=2) for kind in FAMILIES}, STEPS)
SUMS_OF_ONE = InBothTypes(1, {kind: job(kind) for kind in WITHOUT_EXPERTS}, STEPS)
SHARED = InBothTypes(4, {kind: job(kind, fsdp=2, cp=2) for kind in WITHOUT_EXPERTS}, STEPS)


@pytest.mark.parametrize("kind", thinned(FAMILIES, QUICK, [kind for kind in FAMILIES if kind not in QUICK]))
def test_a_pipeline_gives_the_bits_of_one_process(kind: str) -> None:
    assert_identical(PIPELINE[kind], ONE[kind])


@pytest.mark.parametrize("kind", thinned(WITHOUT_EXPERTS, [], ["gemma3"]))
def test_shared_weights_and_rows_add_up_what_one_process_does(kind: str) -> None:
    assert_same_sums(SHARED.numbers(kind), SUMS_OF_ONE.numbers(kind))
