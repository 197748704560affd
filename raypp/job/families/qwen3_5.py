"""Qwen3.5, text only: the gated delta rule in three of four layers."""

from raypp.job.families import delta
from raypp.job.family import Family, HfFormat

FAMILY = Family(
    name="qwen3_5",
    summary="Qwen3.5 (text): gated delta rule and full attention",
    layer=lambda options, index: delta.layer(options, split_delta=True),
    hf=HfFormat(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        settings=delta.SETTINGS,
        defaults={**delta.DELTA_DEFAULTS, "num_kv_heads": 4},
        exact=delta.DELTA_EXACT,
        within=("qwen3_5",),
        read=delta.read,
        write=delta.write,
    ),
    options=delta.DeltaOptions,
    rotary=delta.rotary,
    position=42,
)
