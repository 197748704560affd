"""Random orders that are computed, not stored: a part of an order costs only that part.

The order is a Feistel network with cycle walking (M. Luby and C. Rackoff, 1988; J. Black and P.
Rogaway, 2002) in plain 64-bit integer arithmetic, so it is the same on every machine and with every
version of numpy. It is meant for shuffling, not for cryptography.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def permuted(positions: NDArray[np.int64], count: int, *key: int | str) -> NDArray[np.int64]:
    """Returns the items at some positions of a random order of `count` items.

    Args:
        positions: int64 `[n]`, each in `[0, count)`.
        count: Number of items.
        key: Selects the order, e.g. a seed and an epoch.

    Returns:
        int64 `[n]`; over all positions every item appears exactly once.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = [np.uint64(k) for k in _round_keys(key)]
    result = _encipher(positions.astype(np.uint64), half, keys)
    # The network permutes a power of four; values outside the range are enciphered until inside.
    outside = np.flatnonzero(result >= count)
    while len(outside):
        result[outside] = _encipher(result[outside], half, keys)
        outside = outside[result[outside] >= count]
    return result.astype(np.int64)


def _round_keys(key: tuple[int | str, ...]) -> list[int]:
    digest = hashlib.shake_128(repr(key).encode()).digest(8 * _ROUNDS)
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]


def _encipher(values: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads every bit over all 64 (the finaliser of MurmurHash3, A. Appleby)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
