"""Qwen3 with experts, in every layer or in some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import DEFAULTS, EXACT, EXPERT_SIZES, NO, SETTINGS, SIZES, Family, HfFormat, Weight
from raypp.spec.models import MoeOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer

NAMES = ("gate_proj", "up_proj", "down_proj")
MOE_SETTINGS = {name: name for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")}
MOE_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}


def layer_weights(options: MoeOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased, head_norms=True)
    with_experts = options.has_experts(index)
    block = weights.experts(options, "mlp", NAMES) if with_experts else weights.gated(options)
    return [*attention, *weights.layer_norms(options), *block]


def build_layer(options: MoeOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward
    from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer

    biased = options.attention_bias
    attention = Attention(options, qkv_bias=biased, out_bias=biased, head_norms=True)
    if options.has_experts(index):
        return MoeDecoderLayer(options, attention, MixtureOfExperts(options, NAMES))
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="qwen3_moe",
    summary="Qwen3 with experts: 30B-A3B, 235B-A22B, Qwen3-Coder-30B-A3B",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES},
        newer={"num_experts": "num_local_experts"},
        settings={**SETTINGS, **MOE_SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, **MOE_DEFAULTS, "attention_bias": False},
        exact={**EXACT, "use_sliding_window": NO},
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=MoeOptions,
    position=40,
)
