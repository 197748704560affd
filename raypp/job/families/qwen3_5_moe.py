"""Qwen3.5 with experts, text only: experts in every layer, one of them shared."""

from raypp.job.families import delta
from raypp.job.families.qwen3_next import Qwen3NextOptions
from raypp.job.family import EXPERT_SIZES, SIZES, Family, HfFormat

FAMILY = Family(
    name="qwen3_5_moe",
    summary="Qwen3.5-35B-A3B (text): gated delta rule and full attention, experts",
    layer=lambda options, index: delta.layer(options, split_delta=True, mlp="experts", shared=options.shared_ffn_size),
    hf=HfFormat(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        sizes={
            **{name: key for name, key in SIZES.items() if name != "ffn_size"},
            **EXPERT_SIZES,
            "shared_ffn_size": "shared_expert_intermediate_size",
        },
        settings=delta.SETTINGS,
        defaults=delta.DELTA_DEFAULTS,
        exact=delta.DELTA_EXACT,
        within=("qwen3_5_moe",),
        training={"aux_loss_weight": "router_aux_loss_coef"},
        read=delta.read,
        write=delta.write,
    ),
    options=Qwen3NextOptions,
    rotary=delta.rotary,
    position=43,
)
