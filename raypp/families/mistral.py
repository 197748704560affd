"""Mistral: Llama whose queries may see a window of tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import weights
from raypp.spec.attention_rule import AttentionRule
from raypp.spec.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Weight
from raypp.spec.models import DecoderOptions

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


class MistralOptions(DecoderOptions):
    """Options of Mistral."""

    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)


def layer_weights(options: MistralOptions, index: int) -> list[Weight]:
    return [*weights.attention(options), *weights.layer_norms(options), *weights.gated(options)]


def build_layer(options: MistralOptions, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward

    attention = Attention(options, rule=options.attention_rule(index))
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


FAMILY = Family(
    name="mistral",
    summary="Mistral: Llama with a window, or without",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "mistral",
        "MistralForCausalLM",
        settings={**SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "sliding_window": 4096},
        exact=EXACT,
    ),
    options=MistralOptions,
    position=55,
)
