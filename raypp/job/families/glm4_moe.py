"""GLM-4.5, 4.6 and 4.7: half of each head rotated, experts in all but the first layers."""

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.job.families.routed import ROUTED_DEFAULTS, ROUTED_EXACT, ROUTED_SETTINGS, ROUTED_SIZES, routed
from raypp.job.family import DEFAULTS, Family, HfFormat
from raypp.job.models import RouterOptions


class Glm4MoeOptions(RouterOptions, PartialRotaryOptions):
    """Options of GLM-4.5."""

    rotary_share: float = Field(default=0.5, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""
    dense_layers: int = Field(default=1, ge=0)
    """Number of first layers with a plain feed-forward block."""
    head_norms: bool = False
    """Queries and keys are normalised per head."""


def layer(options: Glm4MoeOptions, index: int) -> Layer:
    return routed(options, index, Layer(qkv_bias=options.attention_bias, head_norms=options.head_norms))


FAMILY = Family(
    name="glm4_moe",
    summary="GLM-4.5, 4.5-Air, 4.6, 4.7: experts chosen by corrected sigmoid scores",
    layer=layer,
    rotary=rotary,
    hf=HfFormat(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        sizes=ROUTED_SIZES,
        settings={
            **PARTIAL_SETTINGS,
            **ROUTED_SETTINGS,
            "dense_layers": "first_k_dense_replace",
            "attention_bias": "attention_bias",
            "head_norms": "use_qk_norm",
        },
        defaults={
            **DEFAULTS,
            **ROUTED_DEFAULTS,
            "norm_eps": 1e-5,
            "num_kv_heads": 8,
            "rotary_share": 0.5,
            "dense_layers": 1,
            "attention_bias": False,
            "head_norms": False,
        },
        exact={**PARTIAL_EXACT, **ROUTED_EXACT},
    ),
    options=Glm4MoeOptions,
    position=102,
)
