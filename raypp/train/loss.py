"""The loss: a sum over tokens, divided once by the global number of tokens.

Legend: B rows, T tokens, S = B · T, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.pipeline.collate import IGNORED


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the summed cross-entropy of all tokens with a label, a scalar.

    A sum, not a mean: microbatches and replicas differ in tokens, and a mean of means weighs them
    wrongly. The gradients are divided by the global token count once all microbatches are
    accumulated.

    Args:
        logits_BTV: `[B, T, V]`, any floating dtype.
        labels_BT: `[B, T]`, int64; `IGNORED` where a token has no label.

    Returns:
        `[]`, fp32 or the logits' wider dtype; 0 if no token has a label.
    """
    wide_SV = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(wide_SV, labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
