"""OLMo 2: norms after attention and feed-forward, and over all heads of queries and keys."""

from raypp.job.decoder_layer import Layer
from raypp.job.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat
from raypp.job.models import DecoderOptions


def layer(options: DecoderOptions, index: int) -> Layer:
    norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return Layer(qkv_bias=options.attention_bias, out_bias=options.attention_bias, whole_norms=True, norms=norms)


FAMILY = Family(
    name="olmo2",
    summary="OLMo 2 (1B to 32B): norms after the blocks and over whole queries and keys",
    layer=layer,
    hf=HfFormat(
        "olmo2",
        "Olmo2ForCausalLM",
        settings={**SETTINGS, "attention_bias": "attention_bias"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "attention_bias": False},
        exact=EXACT,
    ),
    position=60,
)
