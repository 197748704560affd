"""What a job's data become: the first rows, their loss, lengths and packing."""

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from raypp.job.job import Job
from raypp.rank.data.corpus import Corpus, Piece
from raypp.rank.data.loader import order_of
from raypp.rank.data.sources import open_documents
from raypp.rank.data.tokenizer import Tokenizer, document_of

_MOST_BLOCKS = 8  # about 32,000 pieces
_BINS = 10


@dataclass(frozen=True, eq=False)
class LookedPiece:
    """A part of a document in a row: ids `[n]`, which carry loss `[n]`, and where it begins."""

    ids: NDArray[np.int64]
    loss: NDArray[np.bool_]
    start: int


@dataclass(frozen=True, eq=False)
class Look:
    """A job's training data.

    Attributes:
        documents: Documents, before any is dropped or held out.
        tokens, loss_tokens: Tokens of the training documents, and those that carry loss.
        untrained, untrained_in_words: Tokens that are not learnt, by reason.
        too_long_in_words: What happens to them; empty if there are none.
        around: What each text begins and ends with, if it is not a conversation.
        rows: Rows of an epoch; an estimate if `sampled`.
        fill: Tokens of the rows as a fraction of rows of data.seq_len.
        sampled: `rows` and `fill` come from the first rows of the epoch only.
        edges: Borders of the histogram, in tokens, `[bins + 1]`.
        counts: Documents with a length from an edge up to the next, `[bins]`.
        first: The pieces of the first rows of the first step.
        parts: Documents and tokens of each part of a mixture, by name.
    """

    documents: int
    tokens: int
    loss_tokens: int
    untrained: dict[str, int]
    untrained_in_words: str
    too_long: int
    too_long_in_words: str
    around: tuple[str, str]
    rows: int
    fill: float
    sampled: bool
    edges: list[int]
    counts: list[int]
    first: list[list[LookedPiece]]
    tokenizer: Tokenizer
    parts: dict[str, tuple[int, int]]
    remarks: tuple[str, ...]


def look_at(job: Job, rows: int) -> Look:
    """Reads a job's data as a run would. Raises RayppError: as `open_documents`."""
    documents, data = open_documents(job), job.data
    corpus = documents.train
    order = order_of(documents, job)
    plan = order.once()
    read = min(plan.blocks, _MOST_BLOCKS)
    packed = [row for block in range(read) for row in plan.block(0, block)]
    filled = sum(piece.length for row in packed for piece in row)
    lengths, untrained = corpus.lengths(), documents.untrained()
    edges, counts = histogram(lengths, data.seq_len)
    return Look(
        documents=documents.total,
        tokens=int(lengths.sum()),
        loss_tokens=int(lengths.sum()) - untrained["masked"],
        untrained=untrained,
        untrained_in_words=documents.untrained_in_words(),
        too_long=documents.too_long,
        too_long_in_words=documents.too_long_in_words(data),
        around=_around(documents.tokenizer),
        rows=len(packed) * plan.blocks // read,
        fill=filled / (len(packed) * data.seq_len),
        sampled=read < plan.blocks,
        edges=edges,
        counts=counts,
        first=[
            [_piece(corpus, piece) for piece in pieces]
            for pieces, _ in islice(order.rows(order.start), min(rows, len(packed)))
        ],
        tokenizer=documents.tokenizer,
        parts={part.name: (len(part.corpus), int(part.corpus.lengths().sum())) for part in documents.parts},
        remarks=documents.remarks,
    )


def _around(tokenizer: Tokenizer) -> tuple[str, str]:
    ends = document_of(tokenizer, np.zeros(0, dtype=np.int64))[0][len(tokenizer.before) :]
    return tokenizer.shown(tokenizer.before), tokenizer.shown(ends.tolist())


def histogram(lengths: NDArray[np.int64], seq_len: int) -> tuple[list[int], list[int]]:
    """Returns edges and counts of about ten bins. One edge is where documents become too long."""
    longest = int(lengths.max())
    until = min(longest, seq_len)
    width = -(-until // _BINS)
    edges = [*range(0, until, width), until]
    if longest > seq_len:
        edges += [edge for edge in (2 * seq_len, 4 * seq_len) if edge < longest] + [longest]
    borders = np.array(edges) + 1  # a length equal to an edge is below it
    borders[0] = 0
    return edges, np.histogram(lengths, borders)[0].tolist()


def _piece(corpus: Corpus, piece: Piece) -> LookedPiece:
    ids = np.asarray(corpus.ids(piece.document, piece.start, piece.start + piece.length), dtype=np.int64)
    loss = corpus.carries_loss(piece.document, piece.start, piece.start + piece.length)
    return LookedPiece(ids, np.ones(len(ids), dtype=bool) if loss is None else np.asarray(loss), piece.start)
