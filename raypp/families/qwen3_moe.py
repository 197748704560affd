"""Qwen3 with experts in every layer. `norm_topk_prob`: their probabilities sum to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import EXACT, EXPERT_SIZES, NO, SIZES, Family, HfFormat, Only, Weight
from raypp.spec.models import MoeOptions

if TYPE_CHECKING:
    from raypp.models.moe import MoeDecoderLayer

_NAMES = ("gate_proj", "up_proj", "down_proj")


def layer_weights(options: MoeOptions, index: int) -> list[Weight]:
    attention = weights.attention(options, head_norms=True)
    return [*attention, *weights.layer_norms(options), *weights.experts(options, "mlp", _NAMES)]


def build_layer(options: MoeOptions, index: int) -> MoeDecoderLayer:
    from raypp.models.layers import Attention
    from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer

    return MoeDecoderLayer(options, Attention(options, head_norms=True), MixtureOfExperts(options, _NAMES))


FAMILY = Family(
    name="qwen3_moe",
    summary="Qwen3 with experts",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES},
        exact={
            **EXACT,
            "attention_bias": NO,
            "use_sliding_window": NO,
            "norm_topk_prob": Only((True,)),
            "decoder_sparse_step": Only((None, 1)),
            "mlp_only_layers": Only((None, [])),
        },
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=MoeOptions,
    position=40,
)
