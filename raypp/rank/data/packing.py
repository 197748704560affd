"""Packs documents into rows of at most seq_len tokens, block by block, the same on every rank.

An epoch visits all pieces of documents in an order by (seed, epoch), in blocks of about `BLOCK`,
each packed separately: a seek costs one block, whatever the size of the data.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.rank.data.corpus import Corpus, Piece

BLOCK = 4096
NO_LABEL = -100
PLAN_VERSION = 2
"""Changes if the same data would give other rows."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a microbatch.

    Attributes:
        tokens: Ids, int64 `[n]`.
        labels: The next token of the same document, int64 `[n]`; -100 if there is none, or it
            carries no loss. The last token of a piece that continues in another keeps its label.
        documents: Lengths of the row's pieces in tokens, n in all. No piece attends to another.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: tuple[int, ...]


class RowPlan:
    """The rows of an epoch, computed on demand. Holds 8 bytes per document and copies no tokens.
    `shuffle`: whether to visit the pieces in a random order, a new one each epoch. `block`:
    approximate number of pieces packed at a time."""

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        packing: bool,
        shuffle: bool,
        seed: int,
        *,
        block: int = BLOCK,
        piece: int | None = None,
    ) -> None:
        self.corpus, self.seq_len, self.packing, self.shuffle, self.seed = corpus, seq_len, packing, shuffle, seed
        self._first_piece = np.zeros(len(corpus) + 1, dtype=np.int64)
        self.piece = seq_len if piece is None else piece
        np.cumsum(-(-corpus.lengths() // self.piece), out=self._first_piece[1:])
        self.pieces = int(self._first_piece[-1])
        self.blocks = -(-self.pieces // block)

    def rows(self, epochs: Fraction) -> int:
        """Returns how many rows so many epochs have; of the last one, a share, rounded up."""
        whole, share = divmod(epochs, 1)
        alike = not (self.packing and self.shuffle)  # else each epoch packs other documents together
        counted = [self._rows_of(epoch) for epoch in range(1 if alike else ceil(epochs))]
        return sum(counted[0 if alike else epoch] for epoch in range(int(whole))) + ceil(share * counted[-1])

    def _rows_of(self, epoch: int) -> int:
        return sum(len(self.block(epoch, block)) for block in range(self.blocks))

    def block(self, epoch: int, index: int) -> list[list[Piece]]:
        """Returns the rows of a block, `0 <= index < blocks`; the blocks have similar sizes."""
        begin, end = (self.pieces * i // self.blocks for i in (index, index + 1))
        visited = np.arange(begin, end)
        if self.shuffle:
            visited = permuted(visited, self.pieces, self.seed, epoch)
        pieces = self._pieces(visited)
        if not self.packing:
            return [[piece] for piece in pieces]
        if not self.shuffle:
            return pack_in_order(pieces, self.seq_len)
        rows = pack(pieces, self.seq_len)
        # Packing sorts by length. Shuffling the rows avoids stretches of only long documents.
        mixed = permuted(np.arange(len(rows)), len(rows), self.seed, epoch, index)
        return [rows[i] for i in mixed.tolist()]

    def _pieces(self, numbers: NDArray[np.int64]) -> list[Piece]:
        documents = np.searchsorted(self._first_piece, numbers, side="right") - 1
        starts = (numbers - self._first_piece[documents]) * self.piece
        lengths = np.minimum(self.piece, self.corpus.lengths(documents) - starts)
        return [Piece(*piece) for piece in zip(documents.tolist(), starts.tolist(), lengths.tolist(), strict=True)]


def pack(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Packs by best fit, longest first: each piece goes into the fullest row with room for it."""
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in sorted(pieces, key=lambda p: (-p.length, p.document, p.start)):
        index = bisect_left(room, (piece.length, 0))
        if index == len(room):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left, row = room.pop(index)
        rows[row].append(piece)
        if left > piece.length:
            insort(room, (left - piece.length, row))
    return rows


def pack_in_order(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Packs pieces in their order; starts a new row if the next piece does not fit."""
    rows: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if piece.length > left:
            rows.append([])
            left = seq_len
        rows[-1].append(piece)
        left -= piece.length
    return rows


def make_row(corpus: Corpus, pieces: Sequence[Piece]) -> Row:
    """Reads the tokens and labels of a row from the corpus."""
    total = sum(piece.length for piece in pieces)
    tokens = np.empty(total, dtype=np.int64)
    labels = np.full(total, NO_LABEL, dtype=np.int64)
    at = 0
    for piece in pieces:
        ids = corpus.ids(piece.document, piece.start, piece.start + piece.length + 1)
        tokens[at : at + piece.length] = ids[: piece.length]
        loss = corpus.carries_loss(piece.document, piece.start, piece.start + piece.length + 1)
        learnt = slice(None) if loss is None else loss[1:]
        labels[at : at + len(ids) - 1][learnt] = ids[1:][learnt]
        at += piece.length
    return Row(tokens, labels, tuple(piece.length for piece in pieces))


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


def rows_from(plan: RowPlan, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
    """Yields all rows from a cursor on, without end, each with the cursor after it."""
    epoch, block, first = cursor.epoch, cursor.block, cursor.row
    while True:
        following = Cursor(epoch, block + 1) if block + 1 < plan.blocks else Cursor(epoch + 1)
        rows = plan.block(epoch, block)
        for index in range(first, len(rows)):
            yield rows[index], Cursor(epoch, block, index + 1) if index + 1 < len(rows) else following
        epoch, block, first = following.epoch, following.block, 0


class RowOrder:
    """All rows of a run, in order: here those of one source. Positions in it are immutable.
    `corpus`: the documents of the rows' pieces. `start`: the first row's position."""

    start: Any

    def __init__(self, plan: RowPlan) -> None:
        self._epoch, self.corpus, self.start = plan, plan.corpus, Cursor()

    def rows(self, cursor: Any) -> Iterator[tuple[list[Piece], Any]]:
        """Yields all rows from a position on, each with the position after it."""
        return rows_from(self._epoch, cursor)

    def once(self) -> RowPlan:
        """Returns the plan of one epoch of all documents."""
        return self._epoch

    def document(self, cursor: Any) -> dict[str, Any]:
        """Returns a position as plain JSON data."""
        document: dict[str, Any] = cursor.document()
        return document

    def cursor(self, document: Mapping[str, Any]) -> Any:
        """Reads what `document` returns; raises KeyError, TypeError or ValueError."""
        return Cursor.of(document)

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        """Says in words what a position of other data was made with; empty if that is unknown."""
        return []

    def used(self, cursor: Any) -> dict[str, float]:
        """Returns what was used of each part before a position, by the name in the history."""
        return {}


# Random orders that are computed, not stored: a part of an order costs only that part.
#
# The order is a Feistel network with cycle walking (M. Luby and C. Rackoff, 1988; J. Black and P.
# Rogaway, 2002) in plain 64-bit integer arithmetic, so it is the same on every machine and with
# every version of numpy. It is meant for shuffling, not for cryptography.

_ROUNDS = 8


def permuted(positions: NDArray[np.int64], count: int, *key: int | str) -> NDArray[np.int64]:
    """Returns the items at some positions of a random order of `count` items. `positions`: int64
    `[n]`, each in `[0, count)`. `key`: selects the order, e.g. a seed and an epoch. They are int64
    `[n]`; over all positions every item appears exactly once."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    digest = hashlib.shake_128(repr(key).encode()).digest(8 * _ROUNDS)
    keys = [np.uint64(int.from_bytes(digest[i : i + 8], "little")) for i in range(0, len(digest), 8)]
    result = _encipher(positions.astype(np.uint64), half, keys)
    # The network permutes a power of four; values outside the range are enciphered until inside.
    outside = np.flatnonzero(result >= count)
    while len(outside):
        result[outside] = _encipher(result[outside], half, keys)
        outside = outside[result[outside] >= count]
    return result.astype(np.int64)


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
