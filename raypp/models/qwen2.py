"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from torch import nn

from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward
from raypp.models.stage import DecoderStage
from raypp.spec.models import DecoderOptions


def make_layer(options: DecoderOptions, index: int) -> nn.Module:
    """The layer of a global index; all are alike."""
    attention = Attention(options, qkv_bias=True)
    return DecoderLayer(options, attention, GatedFeedForward(options.hidden_size, options.ffn_size))


def build_stage(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """The stage contract's builder (see `raypp.models.stage`)."""
    return DecoderStage(options, layers, first, last, make_layer)
