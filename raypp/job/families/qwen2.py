"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from raypp.job.decoder_layer import Layer
from raypp.job.families import layer_kinds
from raypp.job.family import Family, HfFormat
from raypp.job.models import WindowOptions

FAMILY = Family(
    name="qwen2",
    summary="Qwen2 and 2.5 (0.5B to 72B), Coder and Math: Llama with biases on q, k, v",
    layer=lambda options, index: Layer(qkv_bias=True),
    hf=HfFormat("qwen2", "Qwen2ForCausalLM", read=layer_kinds.read, write=layer_kinds.write),
    options=WindowOptions,
    position=20,
)
