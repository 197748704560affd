"""The tensors of a Hugging Face model's files. Without torch.

Experts in MXFP4, as the hub's gpt-oss has them, are read as tensors in bf16. A stack `NAME` `[E,
in, out]` is two tensors of bytes in the files. `NAME_blocks` `[E, out, G, 16]` has two 4-bit floats
(E2M1) in a byte, the first in the low half; `NAME_scales` `[E, out, G]` the exponent of 2, plus
127, of each group of 32 inputs (OCP Microscaling Formats 1.0). Every product is exact in bf16,
unless it is too large for it.

Legend: E experts, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from raypp.checkpoint.arrays import Array, convert
from raypp.errors import CheckpointError, Problem
from raypp.untrusted.safetensors_header import ELEMENT_BYTES

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP_BYTES, _DIMS = 16, 4
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: Its name in the file.
        dtype: safetensors' name of its dtype.
        shape: Its shape.
        key: The file's key.
        begin: Offset of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0; a tensor without dims is one row."""
        return prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class GrownTensor(HfTensor):
    """An embedding or a head with more rows than in its file: each of them is the mean of those.

    Attributes:
        stored: Rows in the file.
    """

    stored: int


@dataclass(frozen=True)
class Mxfp4Tensor(HfTensor):
    """A stack of experts' matrices `[E, in, out]` whose bytes are those of two tensors.

    `dtype` is BF16; `key` and `begin` are those of the blocks.

    Attributes:
        blocks: `[E, out, G, 16]`.
        scales: `[E, out, G]`.
    """

    blocks: HfTensor
    scales: HfTensor


def stored_names(name: str, there: Mapping[str, str]) -> Iterable[str]:
    """Returns the names of the tensors in the files that hold the tensor `name`.

    Args:
        name: The tensor's name.
        there: Names in the files.
    """
    pair = (name + _BLOCKS, name + _SCALES)
    return [name] if name in there else [part for part in pair if part in there]


def with_dequantised(tensors: dict[str, HfTensor], place: str, fix: str) -> dict[str, HfTensor]:
    """Returns tensors and, for each pair of blocks and scales, the tensor that they are.

    Args:
        tensors: By their names in the files.
        place: The model's location, for messages.
        fix: What to do about a pair that does not belong together.

    Raises:
        CheckpointError: The shapes of a pair do not belong together.
    """
    merged = dict(tensors)
    for stored, blocks in tensors.items():
        name = stored.removesuffix(_BLOCKS)
        scales = tensors.get(name + _SCALES)
        if name == stored or scales is None or name in tensors:
            continue
        whole = len(blocks.shape) == _DIMS and blocks.shape[-1] == _GROUP_BYTES
        if not whole or scales.shape != blocks.shape[:-1] or {blocks.dtype, scales.dtype} != {"U8"}:
            fault = f"{blocks.dtype} {list(blocks.shape)} and {name}{_SCALES} {scales.dtype} {list(scales.shape)} in "
            raise CheckpointError(Problem(stored, f"{fault}{place} do not form a tensor in MXFP4", fix))
        experts, rows, groups, _ = blocks.shape
        shape = (experts, 2 * _GROUP_BYTES * groups, rows)
        merged[name] = Mxfp4Tensor(name, "BF16", shape, blocks.key, blocks.begin, blocks, scales)
    return merged


def dequantised(blocks: Array, scales: Array) -> Array:
    """Returns the weights `[E, in, out]` as the bits of bf16.

    Args:
        blocks: `[E, out, G, 16]`.
        scales: `[E, out, G]`.
    """
    experts, rows, groups, _ = blocks.shape
    numbers = np.empty((experts, 2 * _GROUP_BYTES * groups, rows), np.uint16)
    for into, codes, exponents in zip(numbers, blocks, scales, strict=True):  # one at a time: they are large
        values = np.empty((rows, groups, 2 * _GROUP_BYTES), np.uint16)
        offsets = exponents.astype(np.uint16)[..., None] << 4
        values[..., ::2] = _table()[offsets | (codes & 15)]
        values[..., 1::2] = _table()[offsets | (codes >> 4)]
        into[:] = values.reshape(rows, -1).T
    return numbers


@lru_cache(maxsize=1)
def _table() -> Array:
    """Returns the bits of bf16 of each exponent and code, `[256 · 16]`."""
    codes = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    exponents = np.arange(_NAN + 1)
    values = np.ldexp(codes, (exponents - _BIAS)[:, None])
    values[_NAN] = np.nan
    with np.errstate(over="ignore"):  # to infinity, as in torch
        return convert(values.reshape(-1), "F64", "BF16")
