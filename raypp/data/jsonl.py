"""JSON lines: each line an object with the text of a document under `data.text_key`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus, from_documents
from raypp.data.files import read_all
from raypp.data.tokenizer import Tokenizer
from raypp.errors import DataError, Problem
from raypp.spec.job import DataSection


def read(data: DataSection, path: str, tokenizer: Tokenizer, seed: int) -> Corpus:
    """All lines of all files, in order of file name."""
    return from_documents(_documents(path, data.text_key, tokenizer), tokenizer.eos_id, tokenizer.vocab_size, path)


def _documents(path: str, key: str, tokenizer: Tokenizer) -> Iterator[NDArray[np.int64]]:
    for name, content in read_all(path, (".jsonl", ".json")):
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                yield tokenizer.encode(_text(line, key, f"{name}:{number}"))


def _text(line: bytes, key: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(Problem("data.path", f"{place} is not JSON: {error}")) from error
    text = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(repr, entry)) if isinstance(entry, dict) else "no object"
        raise DataError(Problem("data.path", f"{place} has no text under {key!r} (it has {keys})", "set data.text_key to the field that holds the text"))
    if not text.strip():
        raise DataError(Problem("data.path", f"{place} is a document without a token", "remove the line"))
    return text
