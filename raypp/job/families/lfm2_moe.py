"""LFM2 with experts: those of all but the first layers are chosen by corrected sigmoid scores."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from raypp.job import limits
from raypp.job.decoder_layer import Layer, Router
from raypp.job.families.lfm2 import FAMILY as LFM2
from raypp.job.families.lfm2 import LAYER, Lfm2Options, layer_types, read, rotary
from raypp.job.family import EXPERT_SIZES, SIZES, Family, HfFormat, Only
from raypp.job.models import RouterOptions


class Lfm2MoeOptions(Lfm2Options, RouterOptions):
    """Options of LFM2 with experts."""

    dense_layers: int = Field(default=2, ge=0, le=limits.LAYERS)
    """Number of first layers with a plain feed-forward block."""


def layer(options: Lfm2MoeOptions, index: int) -> Layer:
    if not options.has_experts(index):
        return LAYER
    router = Router(sigmoid=True, bias=("expert_bias", (options.num_experts,)), added=1e-6)
    return replace(LAYER, mlp="experts", router=router)


def _read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    return read({**config, "block_auto_adjust_ff_dim": False}, place)


FAMILY = Family(
    name="lfm2_moe",
    summary="LFM2 8B-A1B, 24B-A2B: gated short convolutions, experts chosen by corrected sigmoid scores",
    layer=layer,
    hf=HfFormat(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES},
        settings={
            **LFM2.hf.settings,
            "dense_layers": "num_dense_layers",
            "norm_topk_prob": "norm_topk_prob",
            "routed_scale": "routed_scaling_factor",
        },
        defaults={**LFM2.hf.defaults, "dense_layers": 2, "norm_topk_prob": True, "routed_scale": 1.0},
        exact={**LFM2.hf.exact, "use_expert_bias": Only((None, True))},
        peft_names_experts=False,
        newer={"tie_word_embeddings": "tie_embedding"},
        read=_read,
        write=layer_types,
    ),
    options=Lfm2MoeOptions,
    rotary=rotary,
    position=45,
)
