"""Products in fp8: no mesh, cut, schedule or recomputation changes the bits.

The reference is one process.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from training import document as small
from training import numbers, thinned, trained


def document(*, layers: int = 4, train: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    model = {"num_kv_heads": 2, "ffn_size": 64, **sections.pop("model", {})}
    return small(layers=layers, model=model, train={"precision": "fp8", **(train or {})}, **sections)


ADAPTERS = {"hidden_size": 64, "lora": {"rank": 4, "alpha": 64}}
PIPELINES = {
    "1f1b": document(pp=2),
    "zbv": document(pp=2, schedule="zbv", pipeline={"stages_per_rank": 2}),
    "recomputed": document(pp=2, train={"activation_checkpointing": "full"}),
    "recomputed selectively, split": document(
        pp=2,
        schedule="interleaved_zero_bubble",
        pipeline={"stages_per_rank": 2},
        train={"activation_checkpointing": "selective"},
    ),
    "weights freed after use": document(pp=2, reshard_after_forward=True),
    "freed, split": document(
        pp=2, schedule="zbv", reshard_after_forward=True, pipeline={"stages_per_rank": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", thinned(PIPELINES, ["zbv"], ["weights freed after use"]))
def test_a_pipeline_gives_the_bits_of_one_process(way: str) -> None:
    found, reference = trained(PIPELINES[way]), trained(document())
    assert_identical(found, reference)
    assert reference["loss"] != trained(document(train={"precision": "bf16"}))["loss"]


MODELS = {
    "adapters": document(model=ADAPTERS),
    "adapters on fp8": document(model={**ADAPTERS, "lora": {**ADAPTERS["lora"], "base": "fp8"}}),
    "delta rule": document(
        model={
            "kind": "qwen3_5", "hidden_size": 64, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", thinned(MODELS, [], ["adapters on fp8"]))
def test_other_models_give_the_bits_of_one_process(model: str) -> None:
    whole = MODELS[model]
    assert_identical(trained({**whole, "mesh": {"pp": 2}}), trained(whole))


MESHES = [{"fsdp": 2}, {"dp_replicate": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "reshard_after_forward": True}]


@pytest.mark.parametrize("mesh", thinned(MESHES, [], MESHES[:1]), ids=str)
def test_ranks_that_share_a_step_add_up_what_one_process_does(mesh: dict[str, Any]) -> None:
    assert_same_sums(numbers(document(**mesh)), numbers(document()))
