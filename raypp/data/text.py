"""Plain text: a document is a paragraph, paragraphs are separated by blank lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus, from_documents
from raypp.data.files import read_all
from raypp.data.tokenizer import Tokenizer
from raypp.errors import DataError, Problem
from raypp.spec.job import DataSection

_BLANK = re.compile(r"\n[ \t\r]*\n\s*")


def read(data: DataSection, path: str, tokenizer: Tokenizer, seed: int) -> Corpus:
    """All paragraphs of all files, in order of file name."""
    return from_documents(_paragraphs(path, tokenizer), tokenizer.eos_id, tokenizer.vocab_size, path)


def _paragraphs(path: str, tokenizer: Tokenizer) -> Iterator[NDArray[np.int64]]:
    for name, content in read_all(path, (".txt", ".text", ".md")):
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise DataError(Problem("data.path", f"{name}:{line} is not UTF-8", "convert the file, e.g. with iconv")) from error
        for paragraph in _BLANK.split(text.strip()):
            if paragraph:
                yield tokenizer.encode(paragraph)
