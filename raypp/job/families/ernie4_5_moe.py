"""ERNIE 4.5 with experts: neighbouring dims rotated, a correction of softmax scores."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from raypp.job import limits
from raypp.job.decoder_layer import Layer, Router
from raypp.job.family import DEFAULTS, EXACT, NO, SETTINGS, SIZES, Family, HfFormat, Only
from raypp.job.models import RouterOptions

_LEAST = 1e-12


class Ernie45MoeOptions(RouterOptions):
    """Options of ERNIE 4.5 with experts."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    shared_experts: int = Field(default=2, ge=0, le=limits.WIDTH)
    """Experts that all tokens share: one block of so many times expert_ffn_size."""
    dense_layers: int = Field(default=1, ge=0, le=limits.LAYERS)
    """Number of first layers with a plain feed-forward block."""
    last_expert_layer: int | None = Field(default=None, ge=0, le=limits.LAYERS)
    """Last layer, from 0, that may have experts. null: the last of all."""

    def has_experts(self, index: int) -> bool:
        within = self.last_expert_layer is None or index <= self.last_expert_layer
        return within and super().has_experts(index)


def layer(options: Ernie45MoeOptions, index: int) -> Layer:
    if not options.has_experts(index):
        return Layer(neighbours=True)
    router = Router(bias=("moe_statics.e_score_correction_bias", (1, options.num_experts)), least=_LEAST)
    return Layer(neighbours=True, mlp="experts", shared=options.shared_width, shared_gate=False, router=router)


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the last layer with experts; null if no layer follows it."""
    last = config.get("moe_layer_end_index")
    return {"last_expert_layer": None if last in (None, -1, config["num_hidden_layers"] - 1) else last}


def write(options: Ernie45MoeOptions) -> dict[str, Any]:
    return {"moe_layer_end_index": -1 if options.last_expert_layer is None else options.last_expert_layer}


FAMILY = Family(
    name="ernie4_5_moe",
    summary="ERNIE 4.5 21B-A3B, 300B-A47B: experts chosen by corrected scores",
    layer=layer,
    hf=HfFormat(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        sizes={
            **SIZES,
            "num_experts": "moe_num_experts",
            "experts_per_token": "moe_k",
            "expert_ffn_size": "moe_intermediate_size",
        },
        settings={
            **SETTINGS,
            "shared_experts": "moe_num_shared_experts",
            "dense_layers": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
            "last_expert_layer": "moe_layer_end_index",
        },
        defaults={
            **DEFAULTS,
            "norm_eps": 1e-5,
            "num_kv_heads": 4,
            "rope_theta": 500000.0,
            "tie_embeddings": True,
            "shared_experts": 2,
            "dense_layers": 1,
            "decoder_sparse_step": 1,
        },
        exact={**EXACT, "use_bias": NO, "moe_norm_min": Only((None, _LEAST))},
        read=read,
        write=write,
    ),
    options=Ernie45MoeOptions,
    position=121,
)
