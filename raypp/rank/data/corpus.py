"""Documents as flat arrays of ids and the offset of each document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]
A = TypeVar("A", covariant=True)
_CHUNK = 16 << 20


@runtime_checkable
class Fetching(Protocol[A]):
    """An array that is not in memory and comes as `[n]` when sliced: an object in a store."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice) -> A: ...
    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads some spans `[begin, end)` at once, and keeps them for the next slices."""


Ids = IdArray | Fetching[IdArray]
Masks = Mask | Fetching[Mask]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document: `length` tokens from position `start` in the document."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, each ending in the tokenizer's end id.

    The last document of a `tokens` file may lack the end id; conversations end as templates say.

    Attributes:
        shards: All ids in order, each shard `[n]`, possibly memory-mapped. No document crosses two
            shards.
        offsets: Start of each document, counted over all shards, and the end of the last one: int64
            `[documents + 1]`.
        digest: Changes if a document does.
        chosen: The documents that belong to this corpus, int64 `[len]`; None: all.
        loss: Whether each id carries loss, bool, as long as its shard; None: all do.
        template: Changes if the chat template does; empty if the documents have none.
    """

    shards: tuple[Ids, ...]
    offsets: NDArray[np.int64]
    digest: str
    chosen: NDArray[np.int64] | None = None
    loss: tuple[Masks, ...] | None = None
    template: str = ""
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.chosen is None else len(self.chosen)

    @cached_property
    def _shard_starts(self) -> list[int]:
        return [0, *np.cumsum([len(shard) for shard in self.shards]).tolist()]

    def lengths(self, documents: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Returns the token counts of some documents (None: of all), int64 `[n]`."""
        if documents is None:
            documents = self.chosen
        elif self.chosen is not None:
            documents = self.chosen[documents]
        if documents is None:
            return np.diff(self.offsets)
        return np.asarray(self.offsets[documents + 1] - self.offsets[documents])

    def ids(self, document: int, start: int = 0, end: int | None = None) -> IdArray:
        """Returns the ids `[start, end)` of a document, at most to its end; a view, not a copy."""
        shard, where = self._place(document, start, end)
        return self.shards[shard][where]

    def carries_loss(self, document: int, start: int = 0, end: int | None = None) -> Mask | None:
        """Returns which of `ids(document, start, end)` carry loss; None: all."""
        if self.loss is None:
            return None
        shard, where = self._place(document, start, end)
        return self.loss[shard][where]

    def fetch(self, pieces: Iterable[Piece]) -> None:
        """Reads what `ids` will return for some pieces at once, where that is quicker."""
        if not any(isinstance(shard, Fetching) for shard in self.shards):
            return
        wanted: dict[int, list[tuple[int, int]]] = {}
        for piece in pieces:
            shard, where = self._place(piece.document, piece.start, piece.start + piece.length + 1)
            wanted.setdefault(shard, []).append((where.start, where.stop))
        for shard, spans in wanted.items():
            for there in (self.shards[shard], *(self.loss[shard : shard + 1] if self.loss is not None else ())):
                if isinstance(there, Fetching):
                    there.fetch(spans)

    def _place(self, document: int, start: int, end: int | None) -> tuple[int, slice]:
        """Returns the shard of a document's ids `[start, end)`, and where they are in it."""
        index = document if self.chosen is None else int(self.chosen[document])
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        shard = bisect_right(self._shard_starts, first) - 1
        base = self._shard_starts[shard]
        until = last if end is None else min(last, first + end)
        return shard, slice(first + start - base, until - base)

    def select(self, documents: NDArray[np.int64]) -> Corpus:
        """Returns a corpus of some documents, in the given order; copies no ids."""
        chosen = documents if self.chosen is None else self.chosen[documents]
        return replace(self, chosen=chosen)


def without_loss(corpus: Corpus, most: int) -> int:
    """Returns how many tokens carry no loss; of more than `most` tokens by the first of them."""
    if corpus.loss is None:
        return 0
    if corpus.chosen is None:
        parts = (shard[at : at + _CHUNK] for shard in corpus.loss for at in range(0, len(shard), _CHUNK))
    else:
        parts = (np.asarray(corpus.carries_loss(index)) for index in range(len(corpus)))
    tokens, read, learnt = int(corpus.lengths().sum()), 0, 0
    while read < min(tokens, most):
        part = next(parts)
        read, learnt = read + len(part), learnt + int(np.count_nonzero(part))
    return round((read - learnt) / read * tokens)


def joined(corpora: Sequence[Corpus]) -> Corpus:
    """Returns the documents of several corpora, in order, with the first digest. Copies no ids."""
    tokens = documents = 0
    offsets, chosen = [np.zeros(1, dtype=np.int64)], []
    for corpus in corpora:
        offsets.append(corpus.offsets[1:] + tokens)
        mine = np.arange(len(corpus.offsets) - 1) if corpus.chosen is None else corpus.chosen
        chosen.append(mine + documents)
        tokens += int(corpus.offsets[-1])
        documents += len(corpus.offsets) - 1
    every = all(corpus.chosen is None for corpus in corpora)
    shards = tuple(shard for corpus in corpora for shard in corpus.shards)
    loss = None
    if any(corpus.loss is not None for corpus in corpora):
        whole = np.bool_(True)
        masks = [corpus.loss or [np.broadcast_to(whole, len(one)) for one in corpus.shards] for corpus in corpora]
        loss = tuple(one for masks_of_one in masks for one in masks_of_one)
    template = "+".join(corpus.template for corpus in corpora if corpus.template)
    every_offset = np.concatenate(offsets)
    remarks = tuple(dict.fromkeys(remark for corpus in corpora for remark in corpus.remarks))
    picked = None if every else np.concatenate(chosen)
    return Corpus(shards, every_offset, corpora[0].digest, picked, loss, template, remarks)


def small_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest dtype that holds ids below `vocab_size`."""
    return np.min_scalar_type(max(0, vocab_size - 1))
