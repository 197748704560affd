"""The loss: a sum over tokens, divided once by the global number of tokens.

Legend: B rows, T tokens, S = B · T, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.pipeline.collate import IGNORED


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of the cross-entropies of all tokens with a label, in fp32 or the logits' own wider dtype.

    Not a mean: microbatches and replicas differ in tokens, and a mean of means weighs them wrongly. The division by
    the global count comes after the gradients of all microbatches are accumulated. No token with a label gives 0.
    """
    wide_SV = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(wide_SV, labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
