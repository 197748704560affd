"""What families with DeepSeek-V3's router, or its attention, have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.decoder_layer import Layer, Router
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Only
from raypp.job.models import LatentOptions, RouterOptions
from raypp.job.rope import Rotary

ROUTED_SIZES = {**SIZES, **EXPERT_SIZES, "num_experts": "n_routed_experts"}
ROUTED_SETTINGS = {
    "routed_scale": "routed_scaling_factor",
    "expert_groups": "n_group",
    "chosen_groups": "topk_group",
    "shared_experts": "n_shared_experts",
    "norm_topk_prob": "norm_topk_prob",
}
ROUTED_DEFAULTS = {
    "routed_scale": 1.0,
    "expert_groups": 1,
    "chosen_groups": 1,
    "shared_experts": 1,
    "norm_topk_prob": True,
}
ROUTED_EXACT = {
    "scoring_func": Only((None, "sigmoid"), written=False),
    "topk_method": Only((None, "noaux_tc"), written=False),
    "moe_layer_freq": Only((None, 1), written=False),
}


def routed(options: RouterOptions, index: int, layer: Layer) -> Layer:
    """Returns a layer with DeepSeek-V3's router and experts, if it has experts."""
    if not options.has_experts(index):
        return layer
    bias = ("gate.e_score_correction_bias", (options.num_experts,))
    return replace(
        layer, mlp="experts", shared=options.shared_width, shared_gate=False, router=Router(sigmoid=True, bias=bias)
    )


class LatentMoeOptions(LatentOptions, RouterOptions):
    """Options of families with latent attention and DeepSeek-V3's router."""


_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OWN = ("num_kv_heads", "head_dim")
LATENT_SIZES = {**ROUTED_SIZES, **{name: name for name in _WIDTHS}}
LATENT_SETTINGS = {
    **{name: key for name, key in SETTINGS.items() if name not in _OWN},
    **ROUTED_SETTINGS,
    **{name: name for name in ("q_lora_rank", "rope_interleave", "attention_bias")},
}
LATENT_DEFAULTS = {**DEFAULTS, **ROUTED_DEFAULTS, "rope_interleave": True, "attention_bias": False}
LATENT_EXACT = {**EXACT, **ROUTED_EXACT}


def latent_layer(options: LatentMoeOptions, index: int) -> Layer:
    bias = options.attention_bias
    layer = Layer(latent=True, qkv_bias=bias, out_bias=bias, neighbours=options.rope_interleave)
    return routed(options, index, layer)


def latent_rotary(options: LatentMoeOptions, index: int) -> Rotary:
    return Rotary(options.qk_rope_head_dim, options.rope_theta, options.rope)


def read_latent(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the widths that attention computes with, and the factor of the scores. Raises
    JobError: there are fewer key/value heads than query heads."""
    heads, keys = config["num_attention_heads"], config.get("num_key_value_heads")
    if keys not in (None, heads):
        fault = f"{place}: num_key_value_heads {keys} is not supported: latent attention has num_attention_heads"
        raise JobError(Problem("model.from_hf", fault, "check that this is the config.json of a language model"))
    width = max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
    scaling = config.get("rope_scaling") or {}
    return {"head_dim": width, "num_kv_heads": heads, "score_mscale": scaling.get("mscale_all_dim") or 0.0}


def write_latent(options: LatentMoeOptions) -> dict[str, Any]:
    scaling = {"rope_scaling": {"mscale_all_dim": options.score_mscale}} if options.score_mscale else {}
    return {"num_key_value_heads": options.num_heads, **scaling}
