"""Qwen2 and 1.5 with experts: one that all tokens share, beside those that tokens choose."""

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.families.qwen3_moe import MOE_DEFAULTS, MOE_SETTINGS
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, NO, SETTINGS, SIZES, Family, HfFormat
from raypp.job.models import MoeOptions


class Qwen2MoeOptions(MoeOptions):
    """Options of Qwen2 with experts."""

    shared_ffn_size: int = Field(default=256, ge=1)
    """Inner width of the expert that all tokens share."""
    qkv_bias: bool = True
    """Biases on the projections of queries, keys and values."""


def layer(options: Qwen2MoeOptions, index: int) -> Layer:
    if not options.has_experts(index):
        return Layer(qkv_bias=options.qkv_bias)
    return Layer(qkv_bias=options.qkv_bias, mlp="experts", shared=options.shared_ffn_size)


FAMILY = Family(
    name="qwen2_moe",
    summary="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: experts, one of them shared",
    layer=layer,
    hf=HfFormat(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES, "shared_ffn_size": "shared_expert_intermediate_size"},
        settings={**SETTINGS, **MOE_SETTINGS, "qkv_bias": "qkv_bias"},
        defaults={**DEFAULTS, **MOE_DEFAULTS, "qkv_bias": True},
        exact={**EXACT, "use_sliding_window": NO},
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=Qwen2MoeOptions,
    position=35,
)
