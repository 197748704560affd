"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotary encoding."""

from __future__ import annotations

from torch import Tensor, nn

from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward, RMSNorm
from raypp.models.stage import DecoderStage
from raypp.spec.models import DecoderOptions


class NormedAttention(Attention):
    """Attention whose queries and keys are normed over the width of a head; one gain for all heads."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__(options)
        self.q_norm = RMSNorm(self.head_dim, options.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, options.norm_eps)

    def norm_heads(self, q_SHD: Tensor, k_SKD: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q_SHD), self.k_norm(k_SKD)


def make_layer(options: DecoderOptions, index: int) -> nn.Module:
    """The layer of a global index; all are alike."""
    return DecoderLayer(options, NormedAttention(options), GatedFeedForward(options.hidden_size, options.ffn_size))


def build_stage(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """The stage contract's builder (see `raypp.models.stage`)."""
    return DecoderStage(options, layers, first, last, make_layer)
