"""Text to token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem, in_words

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<EOS>", "[EOS]", "[SEP]")
"""End-of-text tokens of the usual tokenizers, in the order they are looked for."""


class NotEncodable(Exception):
    """A tokenizer has no ids for a text; `tokenised` says for which."""


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
        """The ids of a text, without an end, int64 `[n]`.

        Raises:
            NotEncodable: The tokenizer has no ids for it.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The same of several texts at once, which may be faster."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    identity = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers.

    Special tokens are never added, and truncation and padding that the file asks for are switched off.

    Raises:
        DataError: The file is missing, is none, or has no end-of-text token.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                Problem(
                    "data.tokenizer",
                    f"cannot read {path}: {error.strerror}",
                    "give `bytes`, or the path of a tokenizer.json that is there on every node",
                )
            ) from error
        self._backend = _backend(content, path)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.identity = hashlib.sha256(content).hexdigest()[:16]
        end = next((name for name in END_NAMES if name in vocabulary), None)
        if end is None:
            raise DataError(
                Problem(
                    "data.tokenizer",
                    f"{path} has no token that ends a text",
                    f"add one of {', '.join(END_NAMES)} to its special tokens",
                )
            )
        self.eos_id = int(vocabulary[end])

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        try:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise NotEncodable(in_words(error)) from error
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def _backend(content: bytes, path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            Problem(
                "data.tokenizer",
                f"{path} is no tokenizer.json: {in_words(error)}",
                "give a file that tokenizers can load",
            )
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


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
