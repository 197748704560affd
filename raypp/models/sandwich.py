"""Decoder layers that normalise what each block takes and returns, as Gemma 2 and 3 have."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from raypp.models.layers import Attention, DecoderLayer, GatedFeedForward, OffsetRMSNorm
from raypp.spec.models import DecoderOptions

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


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
        super().__init__(options, attention, mlp, norms=_NORMS, norm=OffsetRMSNorm)
