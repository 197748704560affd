"""Stochastic rounding of fp32 to bf16, with random bits that depend on what is rounded only.

The bits of an element are a function of the run's seed, the step, the parameter's global name and
the element's place in the whole parameter. So a resumed run draws the same ones, and so does every
mesh: a shard draws its part of what one process draws, and replicas draw the same. There is no
generator state, and every device gives the same bits (`models.counter_hash`).

Legend: R rows of a matrix, L its columns on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypp.models.counter_hash import LANES, hash_key, lanes, splitmix


def rounding_key(seed: int, step: int, name: str) -> int:
    """Returns the 64-bit key of a parameter's random bits in one step, as a signed number.

    Args:
        seed: train.seed.
        step: The step's number.
        name: The parameter's global name.
    """
    return hash_key(f"round:{seed}:{step}:{name}")


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
    first, last = start // LANES, -(-(start + columns) // LANES)
    words = torch.arange(first, last, dtype=torch.int64, device=rows_R.device)
    hashes = splitmix((rows_R * -(-width // LANES)).unsqueeze(1) + words, key)
    numbers = lanes(hashes)[:, start - LANES * first :][:, :columns]
    return numbers.to(torch.int32).bitwise_and_(0xFFFF)


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
