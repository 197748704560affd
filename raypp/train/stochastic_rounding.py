"""Stochastic rounding of fp32 to bf16, with random bits that depend on what is rounded only.

The bits of an element are a function of the run's seed, the step, the parameter's global name and
the element's place in the whole parameter. So a resumed run draws the same ones, and so does every
mesh: a shard draws its part of what one process draws, and replicas draw the same. There is no
generator state. All operations are on integers, so every device gives the same bits.

Legend: R rows of a matrix, L its columns on this rank.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LANES = 4
"""16-bit numbers in a 64-bit hash."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def rounding_key(seed: int, step: int, name: str) -> int:
    """Returns the 64-bit key of a parameter's random bits in one step, as a signed number.

    Args:
        seed: train.seed.
        step: The step's number.
        name: The parameter's global name.
    """
    digest = hashlib.sha256(f"round:{seed}:{step}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_bits(key: int, rows_R: Tensor, width: int, start: int, columns: int) -> Tensor:
    """Returns 16 random bits for each element of some rows of a matrix.

    A hash of 64 bits serves four neighbouring columns.

    Args:
        key: From `rounding_key`.
        rows_R: Numbers of the rows in the whole matrix, int64 `[R]`. Of a stack of matrices, rows
            are counted through all of them.
        width: Columns of the whole matrix.
        start: The first column.
        columns: L, the number of columns.

    Returns:
        int32 `[R, L]`, 0 to 65535, on the device of `rows_R`.
    """
    first, last = start // _LANES, -(-(start + columns) // _LANES)
    words = torch.arange(first, last, dtype=torch.int64, device=rows_R.device)
    hashes = _splitmix((rows_R * -(-width // _LANES)).unsqueeze(1) + words, key)
    lanes = hashes.view(torch.int16)[:, start - _LANES * first :][:, :columns]
    return lanes.to(torch.int32).bitwise_and_(0xFFFF)


def _splitmix(counters: Tensor, key: int) -> Tensor:
    """Hashes counters int64 `[...]` in place; products wrap around."""
    z = counters.add_(1).mul_(_signed(_GOLDEN)).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shifts int64 `[...]` right and fills with zeros; torch's shift copies the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds to one of the two neighbours in bf16, to the nearer one with the higher probability.

    The expected value is the value itself. NaN and infinities stay what they are.

    Args:
        values: fp32 `[...]`, contiguous.
        bits: int32 `[...]`, 0 to 65535, uniform.

    Returns:
        bf16 `[...]`.
    """
    cut = (values.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)
