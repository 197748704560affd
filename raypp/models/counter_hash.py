"""Random bits without a state: a hash of what they are for, and of a counter.

All operations are on integers, so every device gives the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

LANES = 4
"""16-bit numbers in a 64-bit hash."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def hash_key(purpose: str) -> int:
    """Returns the 64-bit key of the random bits for a purpose, as a signed number."""
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little", signed=True)


def splitmix(counters: Tensor, key: int | Tensor) -> Tensor:
    """Hashes counters int64 `[...]` in place; products wrap around.

    Args:
        counters: int64 `[...]`.
        key: From `hash_key`, also as int64 `[]`.
    """
    z = counters.add_(1).mul_(_signed(_GOLDEN)).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def lanes(hashes: Tensor) -> Tensor:
    """Returns the 16-bit numbers of hashes int64 `[..., n]`: int16 `[..., 4 n]`, a view."""
    return hashes.view(torch.int16)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shifts int64 `[...]` right and fills with zeros; torch's shift copies the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
