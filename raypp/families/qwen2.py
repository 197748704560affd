"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import layer_kinds, weights
from raypp.spec.family import Family, HfFormat, Weight
from raypp.spec.models import WindowOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: WindowOptions, index: int) -> list[Weight]:
    return [*weights.attention(options, qkv_bias=True), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: WindowOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, qkv_bias=True, rule=options.attention_rule(index))
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="qwen2",
    summary="Qwen2 and 2.5 (0.5B to 72B), Coder and Math: Llama with biases on q, k, v",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "qwen2",
        "Qwen2ForCausalLM",
        read=layer_kinds.read,
        write=layer_kinds.write,
        own=frozenset({"layer_types"}),
    ),
    options=WindowOptions,
    position=20,
)
