"""GLM-4.7-Flash: DeepSeek-V3's attention and router, and a list of the layers with experts."""

from collections.abc import Mapping
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.families import routed
from raypp.job.family import Family, HfFormat

_DENSE, _SPARSE = "dense", "sparse"


class Glm4MoeLiteOptions(routed.LatentMoeOptions):
    """Options of GLM-4.7-Flash."""

    mlp_only_layers: tuple[int, ...] = (0,)
    """Layers, from 0, with a plain feed-forward block."""


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns what `routed.read_latent` does, and the layers without experts. Raises JobError: as
    there, or a layer is of another kind."""
    kinds = config.get("mlp_layer_types") or [_DENSE, *[_SPARSE] * (config["num_hidden_layers"] - 1)]
    if set(kinds) - {_DENSE, _SPARSE} or len(kinds) != config["num_hidden_layers"]:
        fault = f"{place}: mlp_layer_types does not say {_DENSE} or {_SPARSE} of each layer"
        raise JobError(Problem("model.from_hf", fault, "check that this is the config.json of a language model"))
    dense = tuple(index for index, kind in enumerate(kinds) if kind == _DENSE)
    return {**routed.read_latent(config, place), "mlp_only_layers": dense}


def write(options: Glm4MoeLiteOptions) -> dict[str, Any]:
    kinds = [_SPARSE if options.has_experts(index) else _DENSE for index in range(options.num_layers)]
    return {**routed.write_latent(options), "mlp_layer_types": kinds}


FAMILY = Family(
    name="glm4_moe_lite",
    summary="GLM-4.7-Flash: latent attention, experts chosen by corrected scores",
    layer=routed.latent_layer,
    rotary=routed.latent_rotary,
    hf=HfFormat(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        sizes=routed.LATENT_SIZES,
        settings={**routed.LATENT_SETTINGS, "mlp_only_layers": "mlp_layer_types"},
        rope_keys=("mscale_all_dim",),
        defaults={**routed.LATENT_DEFAULTS, "norm_eps": 1e-5, "q_lora_rank": 768, "routed_scale": 1.8},
        exact=routed.LATENT_EXACT,
        read=read,
        write=write,
    ),
    options=Glm4MoeLiteOptions,
    position=131,
)
