"""Mixtral: Llama with experts in every layer, named `block_sparse_moe`, w1, w3 and w2."""

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import OneWindowOptions
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Family, HfFormat, Only
from raypp.job.models import MoeOptions


class MixtralOptions(OneWindowOptions, MoeOptions):
    """Options of Mixtral."""


FAMILY = Family(
    name="mixtral",
    summary="Mixtral 8x7B, 8x22B: Llama with experts",
    layer=lambda options, index: Layer(mlp_name="block_sparse_moe", mlp="experts", matrices=("w1", "w3", "w2")),
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
