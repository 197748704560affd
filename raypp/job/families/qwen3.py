"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from raypp.job.decoder_layer import Layer
from raypp.job.families import layer_kinds
from raypp.job.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat
from raypp.job.models import WindowOptions


def layer(options: WindowOptions, index: int) -> Layer:
    return Layer(qkv_bias=options.attention_bias, out_bias=options.attention_bias, head_norms=True)


FAMILY = Family(
    name="qwen3",
    summary="Qwen3 (0.6B to 32B): RMSNorm on every query and key head",
    layer=layer,
    hf=HfFormat(
        "qwen3",
        "Qwen3ForCausalLM",
        settings={**SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
        exact=EXACT,
        read=layer_kinds.read,
        write=layer_kinds.write,
    ),
    options=WindowOptions,
    position=30,
)
