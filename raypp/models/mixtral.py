"""Mixtral: Llama with experts in every layer, under its own names (`block_sparse_moe`, w1, w3, w2)."""

from __future__ import annotations

from torch import nn

from raypp.models.layers import Attention
from raypp.models.moe import MixtureOfExperts, MoeDecoderLayer, moe_options
from raypp.models.stage import DecoderStage
from raypp.spec.models import DecoderOptions


def make_layer(options: DecoderOptions, index: int) -> nn.Module:
    """The layer of a global index; all are alike."""
    experts = MixtureOfExperts(moe_options(options), ("w1", "w3", "w2"))
    return MoeDecoderLayer(options, Attention(options), experts, mlp_name="block_sparse_moe")


def build_stage(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """The stage contract's builder (see `raypp.models.stage`)."""
    return DecoderStage(options, layers, first, last, make_layer)
