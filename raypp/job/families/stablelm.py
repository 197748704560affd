"""StableLM: LayerNorm, and positions in a part of each head."""

from collections.abc import Mapping
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.job.family import DEFAULTS, NO, Family, HfFormat, Only
from raypp.job.models import StageEnds


class StableLmOptions(PartialRotaryOptions):
    """Options of StableLM. 0.25 of each head is rotated in its models."""

    use_qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""

    def stage_ends(self) -> StageEnds:
        return StageEnds(layer_norm=True)


def layer(options: StableLmOptions, index: int) -> Layer:
    return Layer(qkv_bias=options.use_qkv_bias)


def check_heads(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Refuses heads that are not hidden_size / num_attention_heads wide. Returns no fields."""
    width, heads, given = config["hidden_size"], config["num_attention_heads"], config.get("head_dim")
    if width % heads:
        fault = f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    elif given and given != width // heads:
        fault = f"head_dim {given} is not supported: the model's heads are hidden_size / num_attention_heads wide"
    else:
        return {}
    fix = "check that this is the config.json of a language model"
    raise JobError(Problem("model.from_hf", f"{place}: {fault}", fix))


FAMILY = Family(
    name="stablelm",
    summary="StableLM 3B, StableLM 2 1.6B, Zephyr 3B: LayerNorm, a part of each head rotated",
    layer=layer,
    rotary=rotary,
    hf=HfFormat(
        "stablelm",
        "StableLmForCausalLM",
        settings={
            **{name: key for name, key in PARTIAL_SETTINGS.items() if name != "head_dim"},
            "norm_eps": "layer_norm_eps",
            "use_qkv_bias": "use_qkv_bias",
        },
        defaults={**DEFAULTS, "norm_eps": 1e-5, "num_kv_heads": 32, "rotary_share": 0.25, "use_qkv_bias": False},
        exact={
            **PARTIAL_EXACT,
            "hidden_dropout": Only((None, 0, 0.0)),
            "qk_layernorm": NO,
            "use_parallel_residual": NO,
        },
        read=check_heads,
    ),
    options=StableLmOptions,
    position=111,
)
