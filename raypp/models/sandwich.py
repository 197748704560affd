"""Decoder layers that normalise what blocks take and return, as Gemma 2 and 3 have."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from raypp.models.documents import PackedDocuments
from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward, OffsetRMSNorm
from raypp.models.rotary import Table
from raypp.spec.models import DecoderOptions


class SandwichLayer(DecoderLayer):
    """Attention and a feed-forward block with GELU, each between two norms with gain 1 + weight.

    Args:
        options: The `model:` section.
        head_norms: Queries and keys are normalised per head.
        index: The global index of the layer.
    """

    def __init__(self, options: DecoderOptions, index: int, *, head_norms: bool = False) -> None:
        width, rule = options.hidden_size, options.attention_rule(index)
        attention = Attention(options, head_norms=head_norms, rule=rule, norm=OffsetRMSNorm)
        mlp = GatedFeedForward(width, options.ffn_size, partial(F.gelu, approximate="tanh"))
        super().__init__(options, attention, mlp)
        self.input_layernorm = OffsetRMSNorm(width, options.norm_eps)
        self.post_attention_layernorm = OffsetRMSNorm(width, options.norm_eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(width, options.norm_eps)
        self.post_feedforward_layernorm = OffsetRMSNorm(width, options.norm_eps)

    def forward(
        self,
        x_BTC: Tensor,
        rotary: Table | None,
        documents: PackedDocuments,
        labelled_BT: Tensor | None = None,
    ) -> Tensor:
        """Runs the layer: `[B, T, C]` to `[B, T, C]`; see `DecoderLayer`."""
        attended = self.self_attn(self.input_layernorm(x_BTC), rotary, documents)
        x_BTC = x_BTC + self.post_attention_layernorm(attended)
        out = self.feed_forward(self.pre_feedforward_layernorm(x_BTC), labelled_BT)
        normed: Tensor = self.post_feedforward_layernorm(out)
        return x_BTC + normed
