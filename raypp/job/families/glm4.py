"""GLM-4-0414 and GLM-Z1: GLM with norms after the blocks, too."""

from raypp.job.decoder_layer import Layer
from raypp.job.families.glm import DEFAULTS_OF_BOTH, EXACT_OF_BOTH, GlmOptions
from raypp.job.families.layer_kinds import PARTIAL_SETTINGS, rotary
from raypp.job.family import Family, HfFormat

FAMILY = Family(
    name="glm4",
    summary="GLM-4-0414 and GLM-Z1 (9B, 32B): GLM with norms after the blocks, too",
    layer=lambda options, index: Layer(
        qkv_bias=True,
        neighbours=True,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        mlp="fused",
    ),
    rotary=rotary,
    hf=HfFormat("glm4", "Glm4ForCausalLM", settings=PARTIAL_SETTINGS, defaults=DEFAULTS_OF_BOTH, exact=EXACT_OF_BOTH),
    options=GlmOptions,
    position=101,
)
