"""Phi 3, 3.5 and 4: fused projections, a window, partial rotary encoding and longrope.

The fused matrices stay fused: they are one product, and adapters of PEFT have them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import weights
from raypp.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.spec.attention_rule import AttentionRule
from raypp.spec.family import DEFAULTS, Family, HfFormat, Only, Weight

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


class Phi3Options(PartialRotaryOptions):
    """Options of Phi 3."""

    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)


def layer_weights(options: Phi3Options, index: int) -> list[Weight]:
    attention = weights.attention(options, fused=True)
    return [*attention, *weights.layer_norms(options), *weights.gated(options, fused=True)]


def build_layer(options: Phi3Options, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, FusedFeedForward

    attention = Attention(options, fused=True, rule=options.attention_rule(index))
    return DecoderLayer(options, attention, FusedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="phi3",
    summary="Phi 3, 3.5 mini and medium, Phi 4, Phi 4 mini: fused projections",
    weights=layer_weights,
    layer=build_layer,
    rotary=rotary,
    hf=HfFormat(
        "phi3",
        "Phi3ForCausalLM",
        settings={**PARTIAL_SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "rotary_share": 1.0},
        exact={**PARTIAL_EXACT, "embd_pdrop": Only((None, 0, 0.0)), "resid_pdrop": Only((None, 0, 0.0))},
    ),
    options=Phi3Options,
    position=70,
)
