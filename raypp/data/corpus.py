"""Documents as one flat array of ids and the places where each begins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents; each ends with the tokenizer's end id.

    Attributes:
        tokens: All ids, one after another, `[total]` (the smallest dtype that holds them; possibly memory-mapped).
        offsets: Where each document begins, and the end: int64 `[documents + 1]`.
    """

    tokens: NDArray[np.integer]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> NDArray[np.int64]:
        """The ids of one document, int64."""
        return np.asarray(self.tokens[self.offsets[index] : self.offsets[index + 1]], dtype=np.int64)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @cached_property
    def digest(self) -> str:
        """Tells two corpora apart: of the lengths and a sample of the ids."""
        digest = hashlib.sha256(self.offsets.tobytes())
        stride = max(1, len(self.tokens) // 1_000_000)
        digest.update(np.ascontiguousarray(self.tokens[::stride]).tobytes())
        return digest.hexdigest()[:16]

    def select(self, documents: NDArray[np.int64]) -> Corpus:
        """Some of the documents, in the order given."""
        parts = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in documents]
        return Corpus(np.concatenate(parts), np.concatenate(([0], np.cumsum(self.lengths[documents]))))


def small_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest dtype that holds ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def from_documents(documents: Iterable[NDArray[np.int64]], eos_id: int, vocab_size: int, place: str) -> Corpus:
    """A corpus of documents given one by one, without their ends.

    Raises:
        DataError: There is none.
    """
    dtype, end = small_dtype(vocab_size), np.array([eos_id])
    parts, lengths = [], []
    for document in documents:
        parts.append(np.concatenate((document, end)).astype(dtype))
        lengths.append(len(document) + 1)
    if not parts:
        raise DataError(Problem("data.path", f"{place} holds no document", "give files with text in them"))
    return Corpus(np.concatenate(parts), np.concatenate(([0], np.cumsum(np.array(lengths, dtype=np.int64)))))
