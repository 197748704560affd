"""Documents as flat arrays of ids and the offset of each document."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, each ending in the tokenizer's end id.

    The last document of a `tokens` file may lack the end id, and conversations end as their
    template says.

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
    loss: tuple[NDArray[np.bool_], ...] | None = None
    template: str = ""

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

    def ids(self, document: int, start: int = 0, end: int | None = None) -> Ids:
        """Returns the ids `[start, end)` of a document, at most to its end; a view, not a copy."""
        shard, where = self._place(document, start, end)
        return self.shards[shard][where]

    def carries_loss(self, document: int, start: int = 0, end: int | None = None) -> NDArray[np.bool_] | None:
        """Returns which of `ids(document, start, end)` carry loss; None: all."""
        if self.loss is None:
            return None
        shard, where = self._place(document, start, end)
        return self.loss[shard][where]

    def _place(self, document: int, start: int, end: int | None) -> tuple[int, slice]:
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


def small_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest dtype that holds ids below `vocab_size`."""
    return np.min_scalar_type(max(0, vocab_size - 1))
