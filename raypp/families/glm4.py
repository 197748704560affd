"""GLM-4-0414 and GLM-Z1: GLM with norms after the blocks, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.families.glm import DEFAULTS_OF_BOTH, EXACT_OF_BOTH, GlmOptions
from raypp.families.layer_kinds import PARTIAL_SETTINGS, rotary
from raypp.spec.family import Family, HfFormat, Weight

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer

_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def layer_weights(options: GlmOptions, index: int) -> list[Weight]:
    attention = weights.attention(options, qkv_bias=True)
    return [*attention, *weights.layer_norms(options, _NORMS), *weights.gated(options, fused=True)]


def build_layer(options: GlmOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, FusedFeedForward

    attention = Attention(options, qkv_bias=True, neighbours=True)
    feed_forward = FusedFeedForward(options.hidden_size, options.ffn_size)
    return DecoderLayer(options, attention, feed_forward, norms=_NORMS)


FAMILY = Family(
    name="glm4",
    summary="GLM-4-0414 and GLM-Z1 (9B, 32B): GLM with norms after the blocks, too",
    weights=layer_weights,
    layer=build_layer,
    rotary=rotary,
    hf=HfFormat(
        "glm4",
        "Glm4ForCausalLM",
        settings=PARTIAL_SETTINGS,
        defaults=DEFAULTS_OF_BOTH,
        exact=EXACT_OF_BOTH,
    ),
    options=GlmOptions,
    position=101,
)
