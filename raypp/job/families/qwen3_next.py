"""Qwen3-Next: the gated delta rule in three of four layers, experts with a shared one."""

from pydantic import Field

from raypp.job import limits
from raypp.job.decoder_layer import Layer
from raypp.job.families import delta
from raypp.job.families.qwen3_moe import MOE_DEFAULTS, MOE_SETTINGS
from raypp.job.family import EXPERT_SIZES, SIZES, Family, HfFormat
from raypp.job.models import MoeOptions


class Qwen3NextOptions(delta.DeltaOptions, MoeOptions):
    """Options of Qwen3-Next."""

    shared_ffn_size: int = Field(default=256, ge=1, le=limits.WIDTH)
    """Inner width of the expert that all tokens share."""


def layer(options: Qwen3NextOptions, index: int) -> Layer:
    if not options.has_experts(index):
        return delta.layer(options)
    return delta.layer(options, mlp="experts", shared=options.shared_ffn_size)


FAMILY = Family(
    name="qwen3_next",
    summary="Qwen3-Next-80B-A3B: gated delta rule and full attention, experts",
    layer=layer,
    hf=HfFormat(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES, "shared_ffn_size": "shared_expert_intermediate_size"},
        settings={**delta.SETTINGS, **MOE_SETTINGS},
        defaults={**delta.DELTA_DEFAULTS, **MOE_DEFAULTS, "norm_topk_prob": True},
        exact=delta.DELTA_EXACT,
        training={"aux_loss_weight": "router_aux_loss_coef"},
        read=delta.read,
        write=delta.write,
    ),
    options=Qwen3NextOptions,
    rotary=delta.rotary,
    position=41,
)
