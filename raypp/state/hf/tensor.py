"""The tensors of a Hugging Face model's files. Without torch.

Experts in MXFP4, as the hub's gpt-oss has them, are read as tensors in bf16. A stack `NAME` `[E,
in, out]` is two tensors of bytes in the files. `NAME_blocks` `[E, out, G, 16]` has two 4-bit floats
(E2M1) in a byte, the first in the low half; `NAME_scales` `[E, out, G]` the exponent of 2, plus
127, of each group of 32 inputs (OCP Microscaling Formats 1.0). Every product is exact in bf16,
unless it is too large for it.

Matrices in FP8 are read as bf16, too: `NAME` `[O, I]` has floats of 8 bits (E4M3), `NAME_scale_inv`
a factor of each block of 128 × 128; those at the ends are smaller. Products are in fp32, then
rounded to bf16, as transformers does.

Legend: E experts, G groups of 32 inputs, O outputs, I inputs.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raypp.errors import CheckpointError, Problem
from raypp.state.checkpoint.arrays import FLOATS, Array, StoredTensor, convert

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP_BYTES, _DIMS = 16, 4
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255
FP8, _FP8_SCALES = "F8_E4M3", "_scale_inv"
FP8_BLOCK = 128
_PART = re.compile(f"({_BLOCKS}|{_SCALES}|{_FP8_SCALES})$")


@dataclass(frozen=True)
class HfTensor(StoredTensor):
    """One tensor of a safetensors file. `begin`: offset of its first byte in the file."""

    key: str
    begin: int


@dataclass(frozen=True)
class GrownTensor(HfTensor):
    """An embedding or a head with more rows than in its file: each of them is the mean of those."""

    stored: int


@dataclass(frozen=True)
class Mxfp4Tensor(HfTensor):
    """A stack of experts' matrices `[E, in, out]` of two tensors' bytes. `dtype` is BF16; `key` and
    `begin` are the blocks'. `blocks`: `[E, out, G, 16]`. `scales`: `[E, out, G]`."""

    blocks: HfTensor
    scales: HfTensor


@dataclass(frozen=True)
class Fp8Tensor(HfTensor):
    """A matrix in FP8 with its factors. `dtype` is BF16; `key` and `begin` are those of the bytes.
    `codes`: `[O, I]`. `scales`: `[O / 128, I / 128]`, rounded up."""

    codes: HfTensor
    scales: HfTensor


def whole_name(name: str) -> str:
    """Returns the name of the tensor that a tensor in the files may be a part of."""
    return _PART.sub("", name)


def stored_names(name: str, there: Mapping[str, str]) -> Iterable[str]:
    """Returns the names of the tensors in the files that hold the tensor `name`."""
    return [part for part in (name, name + _BLOCKS, name + _SCALES, name + _FP8_SCALES) if part in there]


def with_dequantised(tensors: dict[str, HfTensor], place: str, fix: str) -> dict[str, HfTensor]:
    """Returns tensors and, for each pair of codes and scales, the tensor that they are. `tensors`:
    by their names in the files. `fix`: what to do about a pair that does not belong together.
    Raises CheckpointError: the shapes of a pair do not belong together."""
    merged = dict(tensors)
    for stored, blocks in tensors.items():
        factors = tensors.get(stored + _FP8_SCALES)
        if blocks.dtype == FP8 or factors is not None:
            merged[stored] = _in_fp8(stored, blocks, factors, place, fix)
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


def _in_fp8(name: str, codes: HfTensor, scales: HfTensor | None, place: str, fix: str) -> Fp8Tensor:
    """Returns the tensor that a tensor in FP8 and its factors are."""
    stated = f"{codes.dtype} {list(codes.shape)} in {place}"
    if scales is None:
        fault = f"is {stated}, without {name}{_FP8_SCALES}: its values are not known"
        raise CheckpointError(Problem(name, fault, "use a model with one factor per block, or one in bf16"))
    expected = tuple(-(-size // FP8_BLOCK) for size in codes.shape)
    if codes.dtype != FP8 or len(expected) != 2 or scales.dtype not in FLOATS or scales.shape != expected:
        fault = f"is {stated}, and {name}{_FP8_SCALES} is {scales.dtype} {list(scales.shape)}"
        raise CheckpointError(Problem(name, f"{fault}: no factor per block of {FP8_BLOCK} × {FP8_BLOCK}", fix))
    return Fp8Tensor(codes.name, "BF16", codes.shape, codes.key, codes.begin, codes, scales)


def fp8_values(codes: Array, scales: Array, offset: int = 0) -> Array:
    """Returns the weights `[O, I]` as the bits of bf16. `codes`: `[O, I]`, uint8. `scales`: of
    their blocks in fp32, `[o, i]`. `offset`: the first row's place in its block."""
    rows, columns = np.arange(offset, offset + codes.shape[0]), np.arange(codes.shape[1])
    with np.errstate(over="ignore"):  # to infinity, as in torch
        values = _fp8_table()[codes] * scales[rows // FP8_BLOCK][:, columns // FP8_BLOCK]
    return convert(values, "F32", "BF16")


@lru_cache(maxsize=1)
def _fp8_table() -> Array:
    """Returns the value of each code of E4M3, fp32 `[256]`; there is no infinity."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)).astype(np.float32)
    values[-1] = np.nan
    return np.concatenate((values, -values))


def dequantised(blocks: Array, scales: Array) -> Array:
    """Returns bf16 bits `[E, in, out]` of blocks `[E, out, G, 16]` and scales `[E, out, G]`."""
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
