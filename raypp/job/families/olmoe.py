"""OLMoE: Llama with experts in every layer, and norms over all heads of queries and keys."""

from raypp.job.decoder_layer import Layer
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Family, HfFormat, Only
from raypp.job.models import MoeOptions

_NAMES = ("gate_proj", "up_proj", "down_proj")


def layer(options: MoeOptions, index: int) -> Layer:
    return Layer(qkv_bias=options.attention_bias, out_bias=options.attention_bias, whole_norms=True, mlp="experts")


FAMILY = Family(
    name="olmoe",
    summary="OLMoE-1B-7B: experts, norms over whole queries and keys",
    layer=layer,
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
