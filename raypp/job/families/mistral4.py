"""Mistral Small 4 (text): DeepSeek-V3's attention, queries scaled by position, softmax experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from raypp.errors import JobError, Problem
from raypp.job import limits
from raypp.job.decoder_layer import Layer, Router
from raypp.job.families import routed
from raypp.job.families.layer_kinds import PARTIAL_EXACT
from raypp.job.family import Family, HfFormat
from raypp.job.rope import Rotary

_GROWTH = "llama_4_scaling_beta"


class Mistral4Options(routed.LatentMoeOptions):
    """Options of Mistral Small 4."""

    query_growth: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Queries at position p are multiplied by 1 + query_growth · ln(1 + ⌊p / query_context⌋)."""
    query_context: int = Field(default=8192, ge=1, le=limits.COUNT)
    """See query_growth; rope.original_context if there is one."""

    @model_validator(mode="after")
    def _no_correction(self) -> Self:
        if self.router_bias_rate:
            raise ValueError("router_bias_rate: the routers of mistral4 have no correction bias, set it to 0")
        return self


def layer(options: Mistral4Options, index: int) -> Layer:
    latent = routed.latent_layer(options, index)
    return replace(latent, mlp="joined", router=Router()) if latent.routes else latent


def rotary(options: Mistral4Options, index: int) -> Rotary:
    plain = routed.latent_rotary(options, index)
    original = options.rope.original_context if options.rope is not None else None
    return replace(plain, growth=options.query_growth, context=original or options.query_context)


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns what `routed.read_latent` does, and how queries grow. Raises JobError: as there, or
    transformers would rotate other dims, or by a scaling of its own."""
    scaling = config.get("rope_scaling") or {}
    if not scaling:
        fault = f"{place}: rope_parameters is missing, for which transformers takes those of one model"
        raise JobError(Problem("model.from_hf", fault, "write those that the model was trained with"))
    rotated, share = config["qk_rope_head_dim"], config.get("partial_rotary_factor")
    width = rotated + config["qk_nope_head_dim"]
    if share is not None and int(width * share) != rotated:
        fault = f"{place}: partial_rotary_factor {share:g} of {width} dims are not qk_rope_head_dim {rotated}"
        raise JobError(Problem("model.from_hf", fault, f"write {rotated / width:g}"))
    kind, values = scaling.get("rope_type") or scaling.get("type") or "default", routed.read_latent(config, place)
    if kind in ("default", "linear"):  # those without a context of their own
        values["query_context"] = scaling.get("original_max_position_embeddings") or 8192
    unscaled = {"rope": None} if kind == "linear" and scaling.get("factor") == 1 else {}
    return {**values, **unscaled, "query_growth": scaling.get(_GROWTH) or 0.0}


def write(options: Mistral4Options) -> dict[str, Any]:
    """Without a scaling, transformers would rotate whole heads: export writes one by 1."""
    common = routed.write_latent(options)
    scaling = {**common.get("rope_scaling", {}), _GROWTH: options.query_growth}
    if options.rope is None:
        scaling |= {"rope_type": "linear", "factor": 1.0}
    if options.rope is None or options.rope.original_context is None:
        scaling["original_max_position_embeddings"] = options.query_context
    share = options.qk_rope_head_dim / options.qk_head_dim
    return {**common, "rope_scaling": scaling, "partial_rotary_factor": share}


FAMILY = Family(
    name="mistral4",
    summary="Mistral Small 4 (text): latent attention, experts chosen by softmax scores",
    layer=layer,
    rotary=rotary,
    hf=HfFormat(
        "mistral4",
        "Mistral4ForCausalLM",
        sizes=routed.LATENT_SIZES,
        settings={**routed.LATENT_SETTINGS, "dense_layers": "first_k_dense_replace"},
        rope_keys=("mscale_all_dim", _GROWTH, "max_position_embeddings"),
        defaults={**routed.LATENT_DEFAULTS, "q_lora_rank": 1024, "dense_layers": 0},
        exact=PARTIAL_EXACT,
        within=("mistral3",),
        read=read,
        write=write,
    ),
    options=Mistral4Options,
    position=132,
)
