"""Products in fp8: no mesh, cut, schedule or recomputation changes the bits.

The reference is one process.
"""

from typing import Any

import pytest
import torch
from comparison import assert_close, assert_identical, assert_same_sums
from training import document as small
from training import numbers, thinned, trained

from raypp.stages.models.fp8 import fused_rows, rows_in_fp8


def document(*, layers: int = 4, train: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    model = {"num_kv_heads": 2, "ffn_size": 64, **sections.pop("model", {})}
    return small(layers=layers, model=model, train={"precision": "fp8", **(train or {})}, **sections)


EXPERTS = {"kind": "qwen3_moe", "num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 32}
GROUPED = {"model": EXPERTS, "train": {"fp8": {"experts": True}}}
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
    "experts": document(**GROUPED),
    "adapters of experts": document(
        model={**EXPERTS, "lora": {"rank": 4, "alpha": 64}}, train={"fp8": {"experts": True}}
    ),
    "experts on fp8": document(
        model={**EXPERTS, "hidden_size": 64, "lora": {"rank": 4, "alpha": 64, "base": "fp8"}},
        train={"precision": "bf16", "fp8": {"experts": True}},
    ),
    "experts of gpt-oss": document(
        model={**EXPERTS, "kind": "gpt_oss", "num_experts": 4}, train={"fp8": {"experts": True}}
    ),
    "adapters": document(model=ADAPTERS),
    "adapters on fp8": document(model={**ADAPTERS, "lora": {**ADAPTERS["lora"], "base": "fp8"}}),
    "delta rule": document(
        model={
            "kind": "qwen3_5", "hidden_size": 64, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", thinned(MODELS, [], ["adapters on fp8", "experts"]))
def test_other_models_give_the_bits_of_one_process(model: str) -> None:
    whole = MODELS[model]
    assert_identical(trained({**whole, "mesh": {"pp": 2}}), trained(whole))


MESHES = [{"fsdp": 2}, {"dp_replicate": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "reshard_after_forward": True}]


@pytest.mark.slow
def test_split_backwards_of_experts_give_the_bits_of_one_process() -> None:
    split = document(pp=2, schedule="zbv", pipeline={"stages_per_rank": 2}, **GROUPED)
    reference = trained(document(**GROUPED))
    assert_identical(trained(split), reference)
    assert reference["loss"] != trained(document(model=EXPERTS))["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 2}], ids=str)
def test_experts_in_fp8_spread_over_ranks_differ_by_roundings_of_gradients_to_bf16(mesh: dict[str, Any]) -> None:
    found, reference = trained(document(**mesh, **GROUPED), 1), trained(document(**GROUPED), 1)
    assert found["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    # As without fp8 (test_experts): an expert's gradient over both ranks' tokens is rounded once.
    assert_close(found, reference, 4e-3)


@pytest.mark.slow
def test_a_kernel_of_its_own_rounds_rows_of_experts_to_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    x, factors = (torch.randn(*shape, generator=generator) for shape in ((5, 64), (4, 64)))
    for rest in ((), (factors, torch.tensor([0, 0, 2, 3, 3]))):
        (ours, scales), (theirs, expected) = (cast(x.bfloat16(), *rest) for cast in (fused_rows(), rows_in_fp8))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) and torch.equal(scales, expected)


@pytest.mark.parametrize("mesh", thinned(MESHES, [], MESHES[:1]), ids=str)
def test_ranks_that_share_a_step_add_up_what_one_process_does(mesh: dict[str, Any]) -> None:
    assert_same_sums(numbers(document(**mesh)), numbers(document()))
