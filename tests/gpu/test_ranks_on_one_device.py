"""Tests that several ranks on one device give the numbers of one rank: NCCL on a GPU, else gloo."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import DEVICE, train

pytestmark = pytest.mark.ranks

STEPS = 3


def document(**mesh: int) -> dict[str, Any]:
    return {
        "name": "one-device",
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96,
            "vocab_size": 128,
        },
        "data": {"kind": "synthetic", "num_documents": 100, "document_len": [3, 40], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"microbatches": 8 // mesh.get("fsdp", 1)},
        "train": {"steps": STEPS, "seed": 3, "precision": "fp32"},
    }  # fmt: skip


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"fsdp": 2}, {"pp": 2, "fsdp": 2}], ids=str)
def test_ranks_that_share_a_device_give_the_losses_of_one_rank_on_the_cpu(mesh: dict[str, int]) -> None:
    one, several = train(document(), STEPS, "cpu"), train(document(**mesh), STEPS, DEVICE)
    assert several["tokens"] == one["tokens"]
    # Sums are in another order; three steps of AdamW amplify the rounding of small gradients.
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
