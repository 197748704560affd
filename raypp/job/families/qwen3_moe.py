"""Qwen3 with experts, in every layer or in some."""

from raypp.job.decoder_layer import Layer
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, NO, SETTINGS, SIZES, Family, HfFormat
from raypp.job.models import MoeOptions

NAMES = ("gate_proj", "up_proj", "down_proj")
MOE_SETTINGS = {name: name for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")}
MOE_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}


def layer(options: MoeOptions, index: int) -> Layer:
    return Layer(
        qkv_bias=options.attention_bias,
        out_bias=options.attention_bias,
        head_norms=True,
        mlp="experts" if options.has_experts(index) else "gated",
    )


FAMILY = Family(
    name="qwen3_moe",
    summary="Qwen3 with experts: 30B-A3B, 235B-A22B, Qwen3-Coder-30B-A3B",
    layer=layer,
    hf=HfFormat(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES},
        newer={"num_experts": "num_local_experts"},
        settings={**SETTINGS, **MOE_SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, **MOE_DEFAULTS, "attention_bias": False},
        exact={**EXACT, "use_sliding_window": NO},
        training={"aux_loss_weight": "router_aux_loss_coef"},
    ),
    options=MoeOptions,
    position=40,
)
