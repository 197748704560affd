"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import BIASES, DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased)
    return [*attention, *weights.layer_norms(options), *weights.gated(options, bias=options.mlp_bias)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, qkv_bias=options.attention_bias, out_bias=options.attention_bias)
    feed_forward = GatedFeedForward(options.hidden_size, options.ffn_size, bias=options.mlp_bias)
    return DecoderLayer(options, attention, feed_forward)


FAMILY = Family(
    name="llama",
    summary="Llama 2, 3, 3.1, 3.2 (1B, 3B), 3.3; others of model_type llama, as SmolLM 1 and 2, TinyLlama, Yi",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "llama",
        "LlamaForCausalLM",
        settings={**SETTINGS, **BIASES},
        defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False},
        exact={**EXACT, "pretraining_tp": Only((None, 1))},
    ),
    position=10,
)
