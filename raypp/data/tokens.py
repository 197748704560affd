"""Ids that somebody has already made: `.npy` files of one dimension, documents separated by the tokenizer's end id."""

from __future__ import annotations

import numpy as np

from raypp.data.corpus import Corpus
from raypp.data.files import local_files
from raypp.data.tokenizer import Tokenizer
from raypp.errors import DataError, Problem
from raypp.spec.job import DataSection


def read(data: DataSection, path: str, tokenizer: Tokenizer, seed: int) -> Corpus:
    """All documents of all files, memory-mapped when there is one file."""
    arrays = []
    for file in local_files(path, (".npy",)):
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise DataError(Problem("data.path", f"{file} is no .npy array: {error}")) from error
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not len(array):
            raise DataError(Problem("data.path", f"{file} holds {array.dtype} {list(array.shape)}", "one dimension of whole numbers is wanted, not empty"))
        arrays.append(array)
    tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
    if not len(ends) or ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    offsets = np.concatenate(([0], ends)).astype(np.int64)
    empty = np.flatnonzero(np.diff(offsets) < 2)
    if len(empty):
        raise DataError(Problem("data.path", f"{path}: document {int(empty[0])} is a document without a token", "remove the repeated end id"))
    return Corpus(tokens, offsets)
