"""Phi 3, 3.5 and 4: fused projections, a window, partial rotary encoding and longrope.

The fused matrices stay fused: they are one product, and adapters of PEFT have them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from raypp.families import weights
from raypp.spec.attention_rule import AttentionRule
from raypp.spec.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only, Weight
from raypp.spec.models import DecoderOptions
from raypp.spec.rope import Rotary

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


class Phi3Options(DecoderOptions):
    """Options of Phi 3."""

    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""
    rotary_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)


def rotary(options: Phi3Options, index: int) -> Rotary:
    return Rotary(int(options.dim_per_head * options.rotary_share), options.rope_theta, options.rope)


def layer_weights(options: Phi3Options, index: int) -> list[Weight]:
    attention = weights.attention(options, fused=True)
    return [*attention, *weights.layer_norms(options), *weights.gated(options, fused=True)]


def build_layer(options: Phi3Options, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, FusedFeedForward

    attention = Attention(options, fused=True, rule=options.attention_rule(index))
    return DecoderLayer(options, attention, FusedFeedForward(options.hidden_size, options.ffn_size))


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the rotated share of a head: transformers 5 writes it to the settings of rotary positions."""
    key = "partial_rotary_factor"
    return {"rotary_share": (config.get("rope_parameters") or {}).get(key, config.get(key, 1.0))}


FAMILY = Family(
    name="phi3",
    summary="Phi 3, 3.5 mini and medium, Phi 4, Phi 4 mini: fused projections",
    weights=layer_weights,
    layer=build_layer,
    rotary=rotary,
    hf=HfFormat(
        "phi3",
        "Phi3ForCausalLM",
        settings={**SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "norm_eps": 1e-5},
        exact={
            **{key: only for key, only in EXACT.items() if key != "partial_rotary_factor"},
            "embd_pdrop": Only((None, 0, 0.0)),
            "resid_pdrop": Only((None, 0, 0.0)),
        },
        read=read,
        write=lambda options: {"partial_rotary_factor": options.rotary_share},
    ),
    options=Phi3Options,
    position=70,
)
