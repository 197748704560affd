"""DeepSeek-V3, R1 and their kin: latent attention, groups of experts in all but some layers."""

from pydantic import Field

from raypp.job import limits
from raypp.job.families import routed
from raypp.job.family import Family, HfFormat


class DeepseekV3Options(routed.LatentMoeOptions):
    """Options of DeepSeek-V3."""

    dense_layers: int = Field(default=1, ge=0, le=limits.LAYERS)
    """Number of first layers with a plain feed-forward block."""


FAMILY = Family(
    name="deepseek_v3",
    summary="DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight: latent attention, experts by corrected scores",
    layer=routed.latent_layer,
    rotary=routed.latent_rotary,
    hf=HfFormat(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        sizes=routed.LATENT_SIZES,
        settings={**routed.LATENT_SETTINGS, "dense_layers": "first_k_dense_replace"},
        rope_keys=("mscale_all_dim",),
        defaults={
            **routed.LATENT_DEFAULTS,
            "q_lora_rank": 1536,
            "expert_groups": 8,
            "chosen_groups": 4,
            "routed_scale": 2.5,
            "dense_layers": 3,
        },
        exact=routed.LATENT_EXACT,
        read=routed.read_latent,
        write=routed.write_latent,
    ),
    options=DeepseekV3Options,
    position=130,
)
