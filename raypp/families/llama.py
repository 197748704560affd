"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import EXACT, NO, Family, HfFormat, Only, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    return [*weights.attention(options), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    return DecoderLayer(options, Attention(options), GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="llama",
    summary="Llama 2/3: RMSNorm, RoPE, grouped queries, SwiGLU",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "llama",
        "LlamaForCausalLM",
        exact={**EXACT, "attention_bias": NO, "mlp_bias": NO, "pretraining_tp": Only((None, 1))},
    ),
    position=10,
)
