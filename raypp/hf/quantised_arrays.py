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
    return _through_int8(rows_MC) if base == "int8" else _through_nf4(rows_MC)


def _through_int8(rows_MC: Array) -> Array:
    scale: Array = np.abs(rows_MC).max(-1, keepdims=True) / np.float32(127)
    codes: Array = np.clip(np.rint(rows_MC / np.maximum(scale, _TINY)), -127, 127)
    return np.multiply(codes, scale)


def _through_nf4(rows_MC: Array) -> Array:
    table: Array = np.array(NF4, np.float32)
    blocks: Array = rows_MC.reshape(*rows_MC.shape[:-1], -1, BLOCK)
    scales: Array = np.abs(blocks).max(-1, keepdims=True)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, blocks / np.maximum(scales, _TINY))
    step: Array = scales.max(-2, keepdims=True) / np.float32(255**2)
    k: Array = np.minimum(np.rint(np.sqrt(scales / np.maximum(step, _TINY))), np.float32(255))
    values: Array = table[codes] * (step * (k * k))
    return values.reshape(rows_MC.shape)
