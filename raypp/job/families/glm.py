"""GLM 4 (9B chat) and GLM-Edge: half of each head rotated by neighbours, biases on q, k, v."""

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, rotary
from raypp.job.family import DEFAULTS, Family, HfFormat, Only


class GlmOptions(PartialRotaryOptions):
    """Options of GLM."""

    rotary_share: float = Field(default=0.5, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""


DEFAULTS_OF_BOTH = {**DEFAULTS, "norm_eps": 1.5625e-7, "num_kv_heads": 2, "head_dim": 128, "rotary_share": 0.5}
EXACT_OF_BOTH = {**PARTIAL_EXACT, "attention_bias": Only((None, True))}
"""What config.json of `glm` and `glm4` have in common."""
FAMILY = Family(
    name="glm",
    summary="GLM-4-9B chat, GLM-Edge: half of each head rotated, biases on q, k, v",
    layer=lambda options, index: Layer(qkv_bias=True, neighbours=True, mlp="fused"),
    rotary=rotary,
    hf=HfFormat("glm", "GlmForCausalLM", settings=PARTIAL_SETTINGS, defaults=DEFAULTS_OF_BOTH, exact=EXACT_OF_BOTH),
    options=GlmOptions,
    position=100,
)
