"""Qwen3 with experts in every layer, their probabilities normed over the chosen ones (`norm_topk_prob`)."""

from __future__ import annotations

from torch import nn

from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer, moe_options
from raypp.models.qwen3 import NormedAttention
from raypp.models.stage import DecoderStage
from raypp.spec.models import DecoderOptions


def make_layer(options: DecoderOptions, index: int) -> nn.Module:
    """The layer of a global index; all are alike."""
    experts = MixtureOfExperts(moe_options(options), ("gate_proj", "up_proj", "down_proj"))
    return MoeDecoderLayer(options, NormedAttention(options), experts)


def build_stage(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """The stage contract's builder (see `raypp.models.stage`)."""
    return DecoderStage(options, layers, first, last, make_layer)
