"""Mixtral: Llama with experts in every layer, named `block_sparse_moe`, w1, w3 and w2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import weights
from raypp.spec.attention_rule import AttentionRule
from raypp.spec.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Family, HfFormat, Only, Weight
from raypp.spec.models import MoeOptions

if TYPE_CHECKING:
    from raypp.models.moe import MoeDecoderLayer

_BLOCK = "block_sparse_moe"
_NAMES = ("w1", "w3", "w2")


class MixtralOptions(MoeOptions):
    """Options of Mixtral."""

    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)


def layer_weights(options: MixtralOptions, index: int) -> list[Weight]:
    experts = weights.experts(options, _BLOCK, _NAMES)
    return [*weights.attention(options), *weights.layer_norms(options), *experts]


def build_layer(options: MixtralOptions, index: int) -> MoeDecoderLayer:
    from raypp.models.layers import Attention
    from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer

    attention = Attention(options, rule=options.attention_rule(index))
    return MoeDecoderLayer(options, attention, MixtureOfExperts(options, _NAMES), mlp_name=_BLOCK)


FAMILY = Family(
    name="mixtral",
    summary="Mixtral 8x7B, 8x22B: Llama with experts",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "mixtral",
        "MixtralForCausalLM",
        # Only experts have a feed-forward block, so intermediate_size is their width.
        sizes={**SIZES, **EXPERT_SIZES, "num_experts": "num_local_experts", "expert_ffn_size": "intermediate_size"},
        settings={**SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "rope_theta": 1e6},
        exact={**EXACT, "router_jitter_noise": Only((None, 0, 0.0))},
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=MixtralOptions,
    position=50,
)
