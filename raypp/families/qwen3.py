"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import qwen_window, weights
from raypp.spec.family import DEFAULTS, EXACT, NO, Family, HfFormat, Weight
from raypp.spec.models import WindowOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: WindowOptions, index: int) -> list[Weight]:
    return [*weights.attention(options, head_norms=True), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: WindowOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, head_norms=True, rule=options.attention_rule(index))
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
        exact={**EXACT, "attention_bias": NO},
        read=qwen_window.read,
        write=qwen_window.write,
        own=frozenset({"layer_types"}),
    ),
    options=WindowOptions,
    position=30,
)
