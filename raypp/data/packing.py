"""Documents into rows of at most seq_len tokens, block by block, the same on every rank.

An epoch visits the documents in an order drawn from (seed, epoch), in blocks of `BLOCK` documents. A block is packed by
itself, so that seeking costs one block and memory is bounded. Documents longer than a row are cut into pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus

BLOCK = 4096
NO_LABEL = -100


@dataclass(frozen=True)
class Piece:
    """Part of a document: `length` tokens from `start` (positions in the document)."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a microbatch.

    Attributes:
        tokens: Ids, int64 `[n]`.
        labels: The next token of the same document, int64 `[n]`; -100 where there is none.
        documents: Lengths of the pieces in the row, in tokens; they sum to n. No piece attends to another.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: tuple[int, ...]


def document_order(count: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """The order in which an epoch visits `count` documents."""
    return np.random.default_rng([seed, epoch]).permutation(count) if shuffle else np.arange(count)


def cut_pieces(documents: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int) -> list[Piece]:
    """Every document whole, or in pieces of seq_len tokens and a rest."""
    return [
        Piece(int(document), start, min(seq_len, int(lengths[document]) - start))
        for document in documents
        for start in range(0, int(lengths[document]), seq_len)
    ]


def pack(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Best fit, longest first: each piece goes into the fullest row that still holds it."""
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in sorted(pieces, key=lambda p: (-p.length, p.document, p.start)):
        place = bisect_left(room, (piece.length, 0))
        if place == len(room):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(piece)
        if left > piece.length:
            insort(room, (left - piece.length, row))
    return rows


def pack_in_order(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Pieces in their order, a new row when the next does not fit."""
    rows: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if piece.length > left:
            rows.append([])
            left = seq_len
        rows[-1].append(piece)
        left -= piece.length
    return rows


@dataclass(frozen=True)
class RowPlan:
    """Which rows an epoch has; nothing is tokenised or copied here.

    Attributes:
        lengths: Of all documents, in tokens.
        seq_len, packing, shuffle, seed: As in the job.
    """

    lengths: NDArray[np.int64]
    seq_len: int
    packing: bool
    shuffle: bool
    seed: int

    @property
    def blocks(self) -> int:
        return -(-len(self.lengths) // BLOCK)

    def block(self, epoch: int, index: int) -> list[list[Piece]]:
        """The rows of one block."""
        order = document_order(len(self.lengths), self.seed, epoch, self.shuffle)
        pieces = cut_pieces(order[index * BLOCK : (index + 1) * BLOCK], self.lengths, self.seq_len)
        if not self.packing:
            return [[piece] for piece in pieces]
        if not self.shuffle:
            return pack_in_order(pieces, self.seq_len)
        rows = pack(pieces, self.seq_len)
        # Packing sorts by length; the rows are mixed again so that no stretch of training sees only long documents.
        return [rows[i] for i in np.random.default_rng([self.seed, epoch, index + 1]).permutation(len(rows))]


def make_row(corpus: Corpus, pieces: Sequence[Piece]) -> Row:
    """The tokens and labels of a row."""
    tokens, labels = [], []
    for piece in pieces:
        whole = corpus.document(piece.document)
        end = piece.start + piece.length
        tokens.append(whole[piece.start : end])
        following = whole[piece.start + 1 : end + 1]
        labels.append(following if len(following) == piece.length else np.append(following, NO_LABEL))
    return Row(np.concatenate(tokens), np.concatenate(labels), tuple(piece.length for piece in pieces))
