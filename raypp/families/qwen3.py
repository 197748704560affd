"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import layer_kinds, weights
from raypp.spec.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Weight
from raypp.spec.models import WindowOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: WindowOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased, head_norms=True)
    return [*attention, *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: WindowOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    biased = options.attention_bias
    rule = options.attention_rule(index)
    attention = Attention(options, qkv_bias=biased, out_bias=biased, head_norms=True, rule=rule)
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
        exact=EXACT,
        read=layer_kinds.read,
        write=layer_kinds.write,
        own=frozenset({"layer_types"}),
    ),
    options=WindowOptions,
    position=30,
)
