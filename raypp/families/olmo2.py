"""OLMo 2: norms after attention and feed-forward, and over all heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer

NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def layer_weights(options: DecoderOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased, whole_norms=True)
    return [*attention, *weights.gated(options), *weights.layer_norms(options, NORMS)]


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    biased = options.attention_bias
    attention = Attention(options, qkv_bias=biased, out_bias=biased, whole_norms=True)
    feed_forward = GatedFeedForward(options.hidden_size, options.ffn_size)
    return DecoderLayer(options, attention, feed_forward, norms=NORMS)


FAMILY = Family(
    name="olmo2",
    summary="OLMo 2 (1B to 32B): norms after the blocks and over whole queries and keys",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "olmo2",
        "Olmo2ForCausalLM",
        settings={**SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "attention_bias": False},
        exact=EXACT,
    ),
    position=60,
)
