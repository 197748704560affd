"""Tokenizers: text to token ids."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem, in_words
from raypp.spec.tokenizer_file import read_tokenizer, vocabulary
from raypp.untrusted.paths import expand_home
from raypp.untrusted.text import visible

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "<EOS>", "[EOS]", "[SEP]")
"""Common end-of-text tokens, in the order of preference. Gemma has `</s>` as a tag of HTML."""

PATIENCE_S = 60.0
"""Seconds that a batch of texts may take, however short they are."""
LEAST_PER_S = 20_000
"""Characters of a longer text that a second must suffice for. Real tokenizers encode 50 times as
many."""
_SHOWN = 300


class NotEncodable(Exception):
    """A tokenizer cannot encode a text; `tokenised` adds which one."""


class TooSlow(NotEncodable):
    """A tokenizer takes so long for some texts that it may never end."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text as tokens.

    Attributes:
        ids: Token ids, int64 `[n]`.
        starts, ends: The characters of the text that each token stands for, int64 `[n]`. Several
            tokens may share a character.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: All ids are below it.
        eos_id: The id that ends every document.
        identity: Changes if the ids of a text would.
    """

    vocab_size: int
    eos_id: int
    identity: str

    def encode(self, text: str) -> NDArray[np.int64]:
        """Returns the ids of a text, without an end id, int64 `[n]`.

        Raises:
            NotEncodable: The tokenizer cannot encode the text.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Encodes several texts at once, which may be faster."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes several texts, and says where each token is in its text.

        Raises:
            NotEncodable: The tokenizer cannot encode one of them.
        """
        ...

    def shown(self, ids: Sequence[int]) -> str:
        """Returns ids as text to look at; incomplete characters become `�`."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also gives text back."""

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with the special tokens that its own model expects.

        Raises:
            NotEncodable: The tokenizer cannot encode the text.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens; an incomplete character is U+FFFD."""
        ...


class ByteTokenizer:
    """Encodes UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    identity = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < self.eos_id).decode("utf-8", errors="replace")

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        return [self._with_offsets(text) for text in texts]

    def shown(self, ids: Sequence[int]) -> str:
        ends = [index for index, one in enumerate(ids) if one >= self.eos_id]
        borders = [-1, *ends, len(ids)]
        parts = (bytes(ids[a + 1 : b]).decode(errors="replace") for a, b in pairwise(borders))
        return "∎".join(parts)

    def _with_offsets(self, text: str) -> Tokens:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        starts = np.repeat(np.arange(len(codes)), widths)
        return Tokens(self.encode(text), starts, starts + 1)


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers.

    Adds no special tokens, except to prompts. Disables truncation and padding even if the file
    requests them.

    Raises:
        DataError: The file is missing or invalid, or has no end-of-text token.
    """

    def __init__(self, path: Path) -> None:
        content = read_tokenizer(path)
        self._backend = _backend(content, path)
        self._template = self._backend.post_processor
        self._backend.post_processor = None  # it adds special tokens, and would take blanks out of the offsets
        ids = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        self.identity = hashlib.sha256(content).hexdigest()[:16]
        end = next((name for name in END_NAMES if name in ids), None)
        if end is None:
            raise DataError(
                Problem(
                    "data.tokenizer",
                    f"{path} has no end-of-text token",
                    f"add one of {', '.join(END_NAMES)} to its special tokens",
                )
            )
        self.eos_id = int(ids[end])

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in self._within_patience(texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        found = []
        for encoding in self._within_patience(texts):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            found.append(Tokens(np.asarray(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1]))
        return found

    def shown(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _within_patience(self, texts: Sequence[str]) -> list[Any]:
        """Encodes texts unless a regular expression of the file backtracks for too long.

        The library cannot be interrupted: after an error its thread computes on until the process
        ends.
        """
        answers: SimpleQueue[list[Any] | BaseException] = SimpleQueue()

        def encode() -> None:
            try:
                answers.put(self._backend.encode_batch(list(texts), add_special_tokens=False))
            except BaseException as error:  # noqa: BLE001 - a pattern that gives up panics: no Exception
                answers.put(error)

        characters = sum(map(len, texts))
        patience_s = PATIENCE_S + characters / LEAST_PER_S
        threading.Thread(target=encode, name="tokenizer", daemon=True).start()
        try:
            answer = answers.get(timeout=patience_s)
        except Empty:
            what = f"{characters:,} characters took more than {patience_s:.0f} s: a regular expression"
            raise TooSlow(f"{what} of the tokenizer may backtrack without end") from None
        if isinstance(answer, BaseException):
            raise NotEncodable(in_words(answer)) from answer
        return answer

    def encode_prompt(self, text: str) -> list[int]:
        try:
            plain = self._backend.encode(text, add_special_tokens=False)
            return list((plain if self._template is None else self._template.process(plain, None, True)).ids)
        except Exception as error:  # the library raises no narrower type
            raise NotEncodable(in_words(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def _backend(content: bytes, path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    vocabulary(content, path)  # within limits that the library does not have
    try:
        backend = Backend.from_str(content.decode("utf-8"))
    except BaseException as error:  # the library raises no narrower type, and a panic is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(
            Problem(
                "data.tokenizer",
                f"{path} is not a tokenizer.json: {visible(in_words(error)[:_SHOWN])}",
                "use a file that the tokenizers library can load",
            )
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def open_tokenizer(name: str) -> PromptTokenizer:
    """Opens the tokenizer `bytes`, or the one in a file.

    Raises:
        DataError: The file is missing or invalid, or has no end-of-text token.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(expand_home(name))


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> list[Problem]:
    """Checks that every id has a row in the embedding; returns the problems."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    return [
        Problem(
            "model.vocab_size",
            f"the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is {vocab_size}",
            f"set model.vocab_size to at least {tokenizer.vocab_size}",
        )
    ]
