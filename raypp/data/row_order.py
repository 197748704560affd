"""The rows of one source in their global order, from any position on; orders are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus, Piece
from raypp.data.packing import RowPlan

C = TypeVar("C")


@dataclass(frozen=True)
class Cursor:
    """The position of the next row in the global order: epoch, block and row in the block."""

    epoch: int = 0
    block: int = 0
    row: int = 0

    def document(self) -> dict[str, Any]:
        """Returns it as plain JSON data."""
        return {"epoch": self.epoch, "block": self.block, "row": self.row}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Cursor:
        """Reads what `document` returns; raises KeyError, TypeError or ValueError."""
        return cls(int(document["epoch"]), int(document["block"]), int(document["row"]))


class RowOrder(Protocol[C]):
    """All rows of a run, in order. `C` is a position in it, immutable.

    Attributes:
        corpus: The documents that the pieces of the rows refer to.
        start: The position of the first row.
    """

    corpus: Corpus
    start: C

    def rows(self, cursor: C) -> Iterator[tuple[list[Piece], C]]:
        """Yields all rows from a position on, each with the position after it."""
        ...

    def once(self) -> RowPlan:
        """Returns the plan of one epoch of all documents."""
        ...

    def document(self, cursor: C) -> dict[str, Any]:
        """Returns a position as plain JSON data."""
        ...

    def cursor(self, document: Mapping[str, Any]) -> C:
        """Reads what `document` returns; raises KeyError, TypeError or ValueError."""
        ...

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        """Says in words what a position of other data was made with; empty if that is unknown."""
        ...

    def used(self, cursor: C) -> dict[str, float]:
        """Returns what was used of each part before a position, by the name in the history."""
        ...


class SingleOrder:
    """The rows of one source.

    Args:
        plan: Its rows.
    """

    def __init__(self, plan: RowPlan) -> None:
        self.plan, self.corpus, self.start = plan, plan.corpus, Cursor()

    def rows(self, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
        return rows_from(self.plan, cursor)

    def once(self) -> RowPlan:
        return self.plan

    def document(self, cursor: Cursor) -> dict[str, Any]:
        return cursor.document()

    def cursor(self, document: Mapping[str, Any]) -> Cursor:
        return Cursor.of(document)

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        return []

    def used(self, cursor: Cursor) -> dict[str, float]:
        return {}


def rows_from(plan: RowPlan, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
    """Yields all rows from a cursor on, without end, each with the cursor after it."""
    epoch, block, first = cursor.epoch, cursor.block, cursor.row
    while True:
        following = Cursor(epoch, block + 1) if block + 1 < plan.blocks else Cursor(epoch + 1)
        rows = plan.block(epoch, block)
        for index in range(first, len(rows)):
            yield rows[index], Cursor(epoch, block, index + 1) if index + 1 < len(rows) else following
        epoch, block, first = following.epoch, following.block, 0


# Random orders that are computed, not stored: a part of an order costs only that part.
#
# The order is a Feistel network with cycle walking (M. Luby and C. Rackoff, 1988; J. Black and P.
# Rogaway, 2002) in plain 64-bit integer arithmetic, so it is the same on every machine and with
# every version of numpy. It is meant for shuffling, not for cryptography.

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
