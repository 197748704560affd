"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from raypp.job.decoder_layer import Layer
from raypp.job.family import BIASES, DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only
from raypp.job.models import DecoderOptions


def layer(options: DecoderOptions, index: int) -> Layer:
    return Layer(qkv_bias=options.attention_bias, out_bias=options.attention_bias, mlp_bias=options.mlp_bias)


FAMILY = Family(
    name="llama",
    summary="Llama 2, 3, 3.1, 3.2 (1B, 3B), 3.3; others of model_type llama, as SmolLM 1 and 2, TinyLlama, Yi",
    layer=layer,
    hf=HfFormat(
        "llama",
        "LlamaForCausalLM",
        settings={**SETTINGS, **BIASES},
        defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False},
        exact={**EXACT, "pretraining_tp": Only((None, 1))},
    ),
    position=10,
)
