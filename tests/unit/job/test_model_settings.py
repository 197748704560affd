"""Settings of the model section that only some families, or some scalings, take."""

from typing import Any

import pytest

from raypp.job.checks import check_spec
from raypp.job.known_families import FAMILIES
from raypp.job.load import parse_job


def found(**model: Any) -> list[str]:
    job = parse_job({"name": "a", "model": model, "data": {"kind": "synthetic"}})
    return [f"{problem.key}: {problem.fault}" for problem in check_spec(job)]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
    ],
)
def test_a_family_refuses_settings_that_it_does_not_have(kind: str, name: str, value: Any) -> None:
    family = FAMILIES[kind]
    if name not in family.options.model_fields:
        return
    refused = [] if name in family.hf.settings else [f"model.{name}: kind {kind} does not have it"]
    assert found(kind=kind, **{name: value}) == refused


def test_llama_has_biases_and_qwen3_moe_has_layers_without_experts() -> None:
    assert not found(kind="llama", attention_bias=True, mlp_bias=True)
    assert not found(kind="qwen3_moe", norm_topk_prob=False, mlp_only_layers=[0, 1], decoder_sparse_step=2)


def test_a_family_whose_heads_follow_from_its_sizes_refuses_others() -> None:
    sizes = {"hidden_size": 64, "num_heads": 4}
    refused = "model.head_dim: 12 is not hidden_size / num_heads, which kind stablelm requires"
    assert found(kind="stablelm", **sizes, head_dim=12) == [refused]
    assert not found(kind="stablelm", **sizes, head_dim=16) and not found(kind="starcoder2", **sizes, head_dim=12)


@pytest.mark.parametrize("kind", ["stablelm", "phi3", "glm"])
def test_an_odd_number_of_rotated_dims_is_refused_with_a_share_that_is_even(kind: str) -> None:
    sizes: dict[str, Any] = {"kind": kind, "hidden_size": 48, "num_heads": 4}
    refused = "model.rotary_share: 3 of the 12 dims of a head would be rotated: not an even number"
    assert found(**sizes, rotary_share=0.25) == [refused]
    assert not found(**sizes, rotary_share=0.3334)


def test_an_incomplete_scaling_is_refused_with_what_it_lacks() -> None:
    assert found(rope={"kind": "yarn", "factor": 4.0}) == [
        "model.rope.original_context: is missing: kind yarn needs it"
    ]
    assert not found(rope={"kind": "yarn", "factor": 4.0, "original_context": 4096})
