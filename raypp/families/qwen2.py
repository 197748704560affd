"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import EXACT, NO, Family, HfFormat, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    return [*weights.attention(options, qkv_bias=True), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, qkv_bias=True)
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="qwen2",
    summary="Qwen2 and 2.5 (0.5B to 72B), Coder and Math: Llama with biases on q, k, v",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat("qwen2", "Qwen2ForCausalLM", exact={**EXACT, "use_sliding_window": NO}),
    position=20,
)
