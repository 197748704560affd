"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import DEFAULTS, EXACT, NO, Family, HfFormat, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    return [*weights.attention(options, head_norms=True), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, head_norms=True)
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="qwen3",
    summary="Qwen3: RMSNorm on every query and key head",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "qwen3",
        "Qwen3ForCausalLM",
        defaults={**DEFAULTS, "head_dim": 128},
        exact={**EXACT, "attention_bias": NO, "use_sliding_window": NO},
    ),
    position=30,
)
