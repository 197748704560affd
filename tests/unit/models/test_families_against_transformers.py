"""Logits and gradients of every family are those of Hugging Face transformers, for the same weights."""

from __future__ import annotations

from typing import Any

import pytest
from reference import assert_equal_at_1e5

from raypp.spec.models import DecoderOptions, MoeOptions

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 80, "vocab_size": 97,
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 97, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attn_implementation": "eager", "rope_theta": 10000.0, "use_cache": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 40}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def test_qwen2_with_its_biases(transformers: Any) -> None:
    config = transformers.Qwen2Config(**THEIRS)
    assert_equal_at_1e5(DecoderOptions(kind="qwen2", **SIZES), transformers.Qwen2ForCausalLM(config))


@pytest.mark.parametrize("head_dim", [12, 20])
def test_qwen3_with_norms_on_heads_of_any_width(transformers: Any, head_dim: int) -> None:
    config = transformers.Qwen3Config(**THEIRS, head_dim=head_dim)
    options = DecoderOptions(kind="qwen3", head_dim=head_dim, **SIZES)
    assert_equal_at_1e5(options, transformers.Qwen3ForCausalLM(config))


def test_qwen3_moe(transformers: Any) -> None:
    config = transformers.Qwen3MoeConfig(
        **THEIRS, head_dim=12, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    assert_equal_at_1e5(MoeOptions(kind="qwen3_moe", **SIZES, **EXPERTS), transformers.Qwen3MoeForCausalLM(config))


def test_mixtral(transformers: Any) -> None:
    config = transformers.MixtralConfig(
        **{**THEIRS, "intermediate_size": 40}, num_local_experts=6, num_experts_per_tok=2, sliding_window=None
    )
    assert_equal_at_1e5(MoeOptions(kind="mixtral", **SIZES, **EXPERTS), transformers.MixtralForCausalLM(config))
