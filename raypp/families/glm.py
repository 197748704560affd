"""GLM 4 (9B chat) and GLM-Edge: half of each head rotated by neighbours, biases on q, k, v."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import weights
from raypp.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.spec.family import DEFAULTS, Family, HfFormat, Only, Weight

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


class GlmOptions(PartialRotaryOptions):
    """Options of GLM."""

    rotary_share: float = Field(default=0.5, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""


def layer_weights(options: GlmOptions, index: int) -> list[Weight]:
    attention = weights.attention(options, qkv_bias=True)
    return [*attention, *weights.layer_norms(options), *weights.gated(options, fused=True)]


def build_layer(options: GlmOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, FusedFeedForward

    attention = Attention(options, qkv_bias=True, neighbours=True)
    return DecoderLayer(options, attention, FusedFeedForward(options.hidden_size, options.ffn_size))


DEFAULTS_OF_BOTH = {**DEFAULTS, "norm_eps": 1.5625e-7, "num_kv_heads": 2, "head_dim": 128, "rotary_share": 0.5}
EXACT_OF_BOTH = {**PARTIAL_EXACT, "attention_bias": Only((None, True))}
"""What config.json of `glm` and `glm4` have in common."""
FAMILY = Family(
    name="glm",
    summary="GLM-4-9B chat, GLM-Edge: half of each head rotated, biases on q, k, v",
    weights=layer_weights,
    layer=build_layer,
    rotary=rotary,
    hf=HfFormat(
        "glm",
        "GlmForCausalLM",
        settings=PARTIAL_SETTINGS,
        defaults=DEFAULTS_OF_BOTH,
        exact=EXACT_OF_BOTH,
    ),
    options=GlmOptions,
    position=100,
)
