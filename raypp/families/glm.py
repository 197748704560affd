"""GLM 4 (9B chat) and GLM-Edge: half of each head rotated by neighbours, biases on q, k, v."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import partial_rotary, weights
from raypp.families.partial_rotary import PartialRotaryOptions
from raypp.spec.family import DEFAULTS, EXACT, Family, HfFormat, Only, Weight

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


DEFAULTS_OF_BOTH = {**DEFAULTS, "norm_eps": 1.5625e-7, "num_kv_heads": 2, "head_dim": 128}
EXACT_OF_BOTH = {
    **{key: only for key, only in EXACT.items() if key != "partial_rotary_factor"},
    "attention_bias": Only((None, True)),
}
"""What config.json of `glm` and `glm4` have in common."""
FAMILY = Family(
    name="glm",
    summary="GLM-4-9B chat, GLM-Edge: half of each head rotated, biases on q, k, v",
    weights=layer_weights,
    layer=build_layer,
    rotary=partial_rotary.rotary,
    hf=HfFormat(
        "glm",
        "GlmForCausalLM",
        defaults=DEFAULTS_OF_BOTH,
        exact=EXACT_OF_BOTH,
        read=partial_rotary.reader(0.5),
        write=partial_rotary.write,
    ),
    options=GlmOptions,
    position=100,
)
