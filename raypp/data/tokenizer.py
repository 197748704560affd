"""Text to token ids."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem

# End-of-text tokens of the usual tokenizers, in the order they are looked for.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
        vocab_size: Ids are below it.
        eos_id: Ends every document.
        identity: Changes when the ids would.
    """

    vocab_size: int
    eos_id: int
    identity: str

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, without an end, int64 `[n]`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    identity = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                Problem("data.tokenizer", f"cannot read {path}: {error.strerror}", "give `bytes`, or the path of a tokenizer.json")
            ) from error
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: Any = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise DataError(Problem("data.tokenizer", f"{path} is no tokenizer.json: {error}")) from error
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self.identity = hashlib.sha256(content).hexdigest()[:16]
        ends = [self._backend.token_to_id(name) for name in _END_NAMES]
        found = next((int(i) for i in ends if i is not None), None)
        if found is None:
            raise DataError(
                Problem(
                    "data.tokenizer",
                    f"{path} has no token that ends a text",
                    f"add one of {', '.join(_END_NAMES)} to its special tokens",
                )
            )
        self.eos_id = found

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer in a file.

    Raises:
        DataError: The file is missing, is none, or has no end-of-text token.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> list[Problem]:
    """Whether every id has a row in the embedding."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    return [
        Problem(
            "model.vocab_size",
            f"the tokenizer has {tokenizer.vocab_size} ids, model.vocab_size is {vocab_size}",
            f"set model.vocab_size to at least {tokenizer.vocab_size}",
        )
    ]
