"""Reads a `tokenizer.json` of Hugging Face's tokenizers, as far as raypp has to know it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Ge, Lt
from typing_extensions import TypedDict

from raypp.errors import DataError, Problem
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.files import read_file

BOUNDS = Bounds(size=256 << 20, values=4_000_000)
"""Limits of the file. One with 260,000 tokens has 35 MB and 2 million values."""
_KEY = "data.tokenizer"
_FIX = "name a tokenizer.json of the tokenizers library, or use `tokenizer: bytes`"

Id = Annotated[int, Ge(0), Lt(2**32)]


class _Added(TypedDict):
    id: Id
    content: str


class _Model(TypedDict):
    vocab: NotRequired[dict[str, Id] | list[tuple[str, Any]]]


class _File(TypedDict):
    model: _Model
    added_tokens: NotRequired[list[_Added] | None]


def read_tokenizer(path: Path) -> bytes:
    """Returns the content of the file that `data.tokenizer` names.

    Raises:
        DataError: It is missing, is not a regular file, or is too large.
    """
    return read_file(path, BOUNDS.size, DataError, _KEY)


def vocabulary(content: bytes, path: Path) -> dict[str, int]:
    """Returns the ids of all tokens.

    Raises:
        DataError: The content is not a tokenizer.json.
    """
    try:
        document = parse_as(_File, content, "", BOUNDS, DataError, _FIX, unknown="ignore")
    except DataError as error:
        whats = [f"{path} is not a tokenizer.json: {problem.what}" for problem in error.problems]
        raise DataError(Problem(_KEY, what, _FIX) for what in whats) from None
    words = document["model"].get("vocab", {})
    found = words if isinstance(words, dict) else {word: index for index, (word, _) in enumerate(words)}
    return found | {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
