"""Tensors without torch: safetensors dtypes as numpy dtypes, and conversion between them.

numpy has no bfloat16: such tensors are arrays of their bits (uint16) until they are converted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.untrusted.safetensors_header import ELEMENT_BYTES

Array = NDArray[Any]
_NUMPY: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "F8_E4M3": "u1", "BOOL": "?",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """Metadata of a tensor. `dtype`: safetensors name of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0; a tensor without dimensions is one row."""
        return prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def pieces(self, at_most: int) -> Iterator[tuple[int, int]]:
        """Splits dimension 0 into ranges of at most `at_most` bytes, but at least one row."""
        if not self.bytes:
            return
        step = max(1, at_most // self.row_bytes)
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the dtype of an array that holds a tensor of this safetensors dtype."""
    return np.dtype(_NUMPY[dtype])


def as_float64(values: Array, dtype: str) -> NDArray[np.float64]:
    """Returns a tensor's values; exact, except for integers beyond 2⁵³."""
    return (_bf16_to_fp32(values) if dtype == "BF16" else values).astype(np.float64)


def convert(values: Array, dtype: str, into: str) -> Array:
    """Converts a floating point tensor to another dtype, rounding to nearest as torch does."""
    if dtype == into:
        return values
    wide = _bf16_to_fp32(values) if dtype == "BF16" else values
    if into != "BF16":
        with np.errstate(over="ignore", invalid="ignore"):  # values too large for fp16 become infinite, as in torch
            return wide.astype(numpy_dtype(into))
    return _fp32_to_bf16(wide.astype(np.float32))


def _bf16_to_fp32(bits: Array) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the upper half of the bits, rounded to nearest, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
