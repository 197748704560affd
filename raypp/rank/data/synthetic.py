"""Synthetic documents that a model can learn: arithmetic progressions, drawn by the seed."""

import hashlib

import numpy as np

from raypp.errors import DataError, Problem
from raypp.kinds import SourceKind
from raypp.rank.data.corpus import Corpus, small_dtype
from raypp.rank.data.tokenised import Request

KIND = SourceKind(
    "synthetic",
    "random documents, to try a mesh without data",
    position=5,
    ids="model",
    keys=("num_documents", "document_len"),
)

_STRIDES = 3


def read(request: Request) -> Corpus:
    """Creates `data.num_documents` documents with lengths uniform in `data.document_len`, with the
    end id. Document d counts start, start + stride, … modulo the ids below the end id, with strides
    from 1 to 3. Raises DataError: minimum length above the maximum, or no id below the end id."""
    low, high = request.data.document_len
    if low > high:
        fault = f"the shortest document ({low}) is longer than the longest ({high})"
        raise DataError(Problem("data.document_len", fault, f"write [{high}, {low}]"))
    end, count = request.tokenizer.eos_id, request.data.num_documents
    if end == 0:
        fault = "the end id of this tokenizer is 0, and synthetic documents consist of the ids below it"
        raise DataError(Problem("data.tokenizer", fault, "leave synthetic documents out, or use another tokenizer"))
    generator = np.random.default_rng([request.seed, 7])
    lengths = generator.integers(low, high + 1, size=count)
    starts = generator.integers(0, end, size=count)
    strides = generator.integers(1, _STRIDES + 1, size=count)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tokens = np.empty(int(offsets[-1]), dtype=small_dtype(request.tokenizer.vocab_size))
    for index in range(count):
        document = tokens[offsets[index] : offsets[index + 1]]
        document[:-1] = (starts[index] + strides[index] * np.arange(lengths[index] - 1)) % end
        document[-1] = end
    digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes()).hexdigest()[:16]
    return Corpus((tokens,), offsets, digest)
