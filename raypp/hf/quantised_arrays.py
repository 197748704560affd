"""What quantising does to weights, without torch.

The numbers are those of `models.quantised_rows`, bit for bit, as a unit test shows.

Legend: M rows, C weights in a row.
"""

from __future__ import annotations

import numpy as np

from raypp.checkpoint.arrays import Array
from raypp.spec.quantised import BLOCK, NF4, Base

_TINY = np.finfo(np.float32).tiny


def rounded(rows_MC: Array, base: Base) -> Array:
    """Returns weights as they are after they were quantised and dequantised.

    Args:
        rows_MC: Whole rows, `[..., M, C]`, in fp32.
        base: int8 or nf4.
    """
    if base == "int8":
        scale = np.abs(rows_MC).max(-1, keepdims=True) / np.float32(127)
        found: Array = np.clip(np.rint(rows_MC / np.maximum(scale, _TINY)), -127, 127) * scale
        return found
    table = np.array(NF4, np.float32)
    blocks = rows_MC.reshape(*rows_MC.shape[:-1], -1, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, blocks / np.maximum(scales, _TINY))
    step = scales.max(-2, keepdims=True) / np.float32(255**2)
    k = np.minimum(np.rint(np.sqrt(scales / np.maximum(step, _TINY))), np.float32(255))
    restored: Array = (table[codes] * (step * (k * k))).reshape(rows_MC.shape)
    return restored
