"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import DEFAULTS, EXACT, NO, SETTINGS, Family, HfFormat, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased, head_norms=True)
    return [*attention, *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    biased = options.attention_bias
    attention = Attention(options, qkv_bias=biased, out_bias=biased, head_norms=True)
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="qwen3",
    summary="Qwen3 (0.6B to 32B): RMSNorm on every query and key head",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "qwen3",
        "Qwen3ForCausalLM",
        settings={**SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
        exact={**EXACT, "use_sliding_window": NO},
    ),
    position=30,
)
