"""OLMoE: Llama with experts in every layer, and norms over all heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.families import weights
from raypp.spec.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Family, HfFormat, Only, Weight
from raypp.spec.models import MoeOptions

if TYPE_CHECKING:
    from raypp.models.moe import MoeDecoderLayer

_NAMES = ("gate_proj", "up_proj", "down_proj")


def layer_weights(options: MoeOptions, index: int) -> list[Weight]:
    biased = options.attention_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased, whole_norms=True)
    return [*attention, *weights.layer_norms(options), *weights.experts(options, "mlp", _NAMES)]


def build_layer(options: MoeOptions, index: int) -> MoeDecoderLayer:
    from raypp.models.layers import Attention
    from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer

    biased = options.attention_bias
    attention = Attention(options, qkv_bias=biased, out_bias=biased, whole_norms=True)
    return MoeDecoderLayer(options, attention, MixtureOfExperts(options, _NAMES))


FAMILY = Family(
    name="olmoe",
    summary="OLMoE-1B-7B: experts, norms over whole queries and keys",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "olmoe",
        "OlmoeForCausalLM",
        # Only experts have a feed-forward block, so intermediate_size is their width.
        sizes={**SIZES, **EXPERT_SIZES, "expert_ffn_size": "intermediate_size"},
        settings={**SETTINGS, "norm_topk_prob": "norm_topk_prob", "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False},
        exact={**EXACT, "clip_qkv": Only((None,)), "sliding_window": Only((None,))},
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=MoeOptions,
    position=65,
)
