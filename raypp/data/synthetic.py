"""Made-up documents that can be learned: arithmetic progressions, drawn from the seed."""

from __future__ import annotations

import numpy as np

from raypp.data.corpus import Corpus, from_documents
from raypp.data.tokenizer import Tokenizer
from raypp.spec.job import DataSection


def read(data: DataSection, path: str, tokenizer: Tokenizer, seed: int) -> Corpus:
    """`data.num_documents` documents with lengths drawn evenly from `data.document_len` (with their end)."""
    generator = np.random.default_rng([seed, 7])
    low, high = data.document_len
    lengths = generator.integers(low, high + 1, size=data.num_documents)
    starts = generator.integers(0, tokenizer.eos_id, size=data.num_documents)
    strides = generator.integers(1, 4, size=data.num_documents)
    documents = (
        (start + stride * np.arange(length - 1)) % tokenizer.eos_id
        for start, stride, length in zip(starts, strides, lengths, strict=True)
    )
    return from_documents(documents, tokenizer.eos_id, tokenizer.vocab_size, "synthetic")


class CountingTokenizer:
    """Ids for synthetic documents: all of the model's, the last ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eos_id, self.identity = vocab_size, vocab_size - 1, f"synthetic-{vocab_size}"

    def encode(self, text: str) -> np.ndarray:
        raise TypeError("synthetic data has no text")
