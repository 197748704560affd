"""A causal convolution of every channel, between two gates that depend on the token (LFM2).

Legend: B rows, T tokens of a row, S = B · T, C residual width and channels, K tokens that the
convolution reads.
"""

from functools import partial

import torch
from torch import Tensor, nn

from raypp.job.layer_rules import ShortConvolution
from raypp.job.models import DecoderOptions
from raypp.stages.models.delta_rule import DepthwiseWeight, convolution, frugal
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.products import Projection
from raypp.stages.models.rotary import Table
from raypp.stages.models.tensor_ranks import weight_here


class GatedConvolution(nn.Module):
    """What a layer has instead of attention."""

    block_name = ShortConvolution.block

    def __init__(self, options: DecoderOptions, rule: ShortConvolution) -> None:
        super().__init__()
        self.conv = DepthwiseWeight(rule.channels, rule.kernel)
        self.in_proj = Projection(options.hidden_size, 3 * rule.channels, bias=False)
        self.out_proj = Projection(rule.channels, options.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, _rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Mixes the tokens of every document: `[B, T, C]` to `[B, T, C]`. Collective over the cp
        group if `documents.across` is set."""
        before, after, x = self.in_proj(x_BTC).chunk(3, dim=-1)
        mixed = convolved((before * x).flatten(0, 1), weight_here(self.conv), documents).view_as(x)
        out: Tensor = self.out_proj(after * mixed)
        return out


# Not compiled: document lengths are Python ints, so every microbatch would trigger a recompilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def convolved(x_SC: Tensor, weight_C1K: Tensor, documents: PackedDocuments) -> Tensor:
    """Returns the convolution of every document, `[S, C]`."""
    states = None if documents.across is None else documents.across.states()
    lengths = documents.lengths if states is None else states.lengths
    before = None if states is None else states.before(x_SC, weight_C1K.shape[-1] - 1)
    out: Tensor = frugal(
        partial(convolution, lengths=tuple(lengths), activation=lambda total: total), x_SC, weight_C1K, before
    )
    if states is not None:
        states.ended(x_SC.new_empty(len(lengths), 0))
    return out
