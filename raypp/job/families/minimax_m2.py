"""MiniMax-M2: norms over all heads, a part of each head rotated, experts in every layer."""

from collections.abc import Mapping
from typing import Any

from raypp.job.decoder_layer import Layer, Router
from raypp.job.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.job.family import DEFAULTS, EXPERT_SIZES, SIZES, Family, HfFormat, Only
from raypp.job.models import RouterOptions


class MiniMaxM2Options(RouterOptions, PartialRotaryOptions):
    """Options of MiniMax-M2."""


def layer(options: MiniMaxM2Options, index: int) -> Layer:
    return Layer(
        whole_norms=True,
        mlp_name="block_sparse_moe",
        mlp="experts",
        matrices=("w1", "w3", "w2"),
        router=Router(sigmoid=True, bias=("e_score_correction_bias", (options.num_experts,))),
    )


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the rotated share, which models on the hub name by `rotary_dim`."""
    given, width = config.get("rotary_dim"), config.get("head_dim") or 128
    named = config.get("partial_rotary_factor") is not None
    return {} if named or not isinstance(given, int) else {"rotary_share": given / width}


FAMILY = Family(
    name="minimax_m2",
    summary="MiniMax-M2, M2.1: experts chosen by corrected sigmoid scores, norms over all heads",
    layer=layer,
    rotary=rotary,
    hf=HfFormat(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES, "num_experts": "num_local_experts", "expert_ffn_size": "intermediate_size"},
        settings=PARTIAL_SETTINGS,
        defaults={**DEFAULTS, "head_dim": 128, "num_kv_heads": 8, "rope_theta": 5e6, "rotary_share": 1.0},
        exact={
            **PARTIAL_EXACT,
            "router_jitter_noise": Only((None, 0, 0.0)),
            "scoring_func": Only((None, "sigmoid"), written=False),
            "use_routing_bias": Only((None, True), written=False),
            "use_qk_norm": Only((None, True), written=False),
            "qk_norm_type": Only((None, "per_layer"), written=False),
            "shared_intermediate_size": Only((None, 0), written=False),
        },
        read=read,
    ),
    options=MiniMaxM2Options,
    position=120,
)
