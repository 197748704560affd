"""Tokenizers: text to token ids."""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem, in_words
from raypp.job.job import AddedToken
from raypp.job.load import parse_job
from raypp.job.tokenizer_file import (
    ROLES,
    SpecialTokens,
    ids_of_model,
    llama_spaces,
    read_tokenizer,
    special_tokens,
    tokenizer_path,
    vocabulary,
)
from raypp.untrusted.text import visible

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "<EOS>", "[EOS]", "[SEP]")
"""Common end-of-text tokens, in the order of preference: for a tokenizer.json without files that
name its end. Gemma has `</s>` as a tag of HTML."""

AddBos = bool | Literal["auto"]
"""`data.add_bos`."""

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
    """A text as tokens. `ids`: token ids, int64 `[n]`. `starts` and `ends`: the characters of the
    text that each token stands for, int64 `[n]`. Several tokens may share a character."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tokenizer(Protocol):
    """The interface of a tokenizer. `vocab_size`: all ids are below it. `eos_id`: the id that ends
    every document. `before`, `after`: the ids that belong before and after a text. `identity`:
    changes if the ids of a text would; without `before` and `after`."""

    vocab_size: int
    eos_id: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    identity: str
    remarks: tuple[str, ...]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Returns the ids of a text, without an end id, int64 `[n]`. Raises NotEncodable."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Encodes several texts at once, which may be faster."""

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes texts, with each token's place in its text. Raises NotEncodable: it cannot."""

    def shown(self, ids: Sequence[int]) -> str:
        """Returns ids as text to look at; incomplete characters become `�`."""


def framed(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Returns a text's ids with those that belong before and after it, and how many are before. A
    text that begins with its beginning itself gets no second one."""
    before, after = tokenizer.before, tokenizer.after
    if tuple(ids[: len(before)].tolist()) == before:
        before = ()
    if not before and not after:
        return ids, 0
    return np.concatenate([before, ids, after]).astype(np.int64), len(before)


def document_of(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Does what `framed` does, and ends the text with the end id."""
    framed_ids, count = framed(tokenizer, ids)
    ended = tokenizer.after[-1:] == (tokenizer.eos_id,)
    return framed_ids if ended else np.append(framed_ids, tokenizer.eos_id), count


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also gives text back. `bos_id`: of the beginning of a text; None: none."""

    bos_id: int | None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens; an incomplete character is U+FFFD."""


class ByteTokenizer:
    """Encodes UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    bos_id: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    identity = "bytes"
    remarks: tuple[str, ...] = ()

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

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


class CountingTokenizer:
    """The ids of synthetic documents: all of the model's; the last one ends a document."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise DataError(Problem("model.vocab_size", f"{vocab_size} leaves only the end id", "use at least 2"))
        self.vocab_size, self.eos_id, self.identity = vocab_size, vocab_size - 1, f"synthetic-{vocab_size}"

    def encode(self, text: Any) -> Any:
        raise TypeError("synthetic data has no text")

    encode_batch = encode_with_offsets = encode

    def shown(self, ids: Sequence[int]) -> str:
        return "".join(f"{one} " for one in ids)


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers, with the special tokens named beside it.

    Encodes texts without what belongs around them. Disables truncation and padding even if the
    file requests them. `add_bos`: what belongs before and after a text. auto: what the file's
    post-processor adds; True: also the beginning, if that does not add it; False: nothing. `added`:
    tokens to add, then their ids by their texts; `new`: the texts of those that it lacks. Raises
    DataError: a file is missing or invalid, there is no end-of-text token, or no beginning to add.
    """

    def __init__(self, path: Path, add_bos: AddBos = "auto", added: Sequence[AddedToken] = ()) -> None:
        content = read_tokenizer(path)
        named = special_tokens(path.parent)
        self._backend = _backend(content, path)
        made = _as_llama(self._backend, llama_spaces(path.parent))
        template = self._backend.post_processor
        self._backend.post_processor = None  # it would take blanks out of the offsets
        made += _add_special(self._backend, named)
        self.new = {token.text for token in added if self._backend.token_to_id(token.text) is None}
        made += _add_own(self._backend, added)
        self.added = {token.text: int(self._backend.token_to_id(token.text)) for token in added}
        self.identity = hashlib.sha256(content + "".join(made).encode()).hexdigest()[:16]
        self.bos_id = self._named(named, "bos_token")
        end, guessed = self._named(named, "eos_token"), ""
        if end is None:
            end = next(iter(ids_of_model(path.parent, "eos_token")), None)
        if end is None:
            guessed = next((name for name in END_NAMES if self._backend.token_to_id(name) is not None), "")
            end = self._backend.token_to_id(guessed) if guessed else None
        if end is None:
            fix = 'write {"eos_token": "…"} into tokenizer_config.json beside it, with one of its tokens'
            raise DataError(Problem("data.tokenizer", f"no file beside {path} names its end-of-text token", fix))
        self.eos_id = int(end)
        around = _around(self._backend, template)
        self.before, self.after = around if add_bos is not False else ((), ())
        if add_bos is True and not self.before:
            first = (self.bos_id,) if self.bos_id is not None else ids_of_model(path.parent, "bos_token")[:1]
            if not first:
                fix = 'leave data.add_bos out, or write {"bos_token": "…"} into tokenizer_config.json beside it'
                raise DataError(Problem("data.add_bos", f"no file beside {path} names a beginning of texts", fix))
            self.before = first
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(*ids, self.eos_id, *self.before, *self.after)
        remarks = []
        if guessed:
            remarks.append(f"no file beside {visible(path)} names its end of text: {guessed} is taken")
        if add_bos is False and around != ((), ()):
            left = "".join(filter(None, map(self._backend.id_to_token, around[0] + around[1])))
            remarks.append(f"data.add_bos is false: texts do not get {visible(left)}, which the tokenizer adds to them")
        self.remarks = tuple(remarks)

    def _named(self, named: SpecialTokens, role: str) -> int | None:
        name = named.names.get(role)
        return None if name is None else self._backend.token_to_id(name)

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in self._within_patience(texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = []
        for encoding in self._within_patience(texts):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            encoded.append(Tokens(np.asarray(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1]))
        return encoded

    def shown(self, ids: Sequence[int]) -> str:
        whole = str(self._backend.decode([self.eos_id, *ids], skip_special_tokens=False))
        # Behind another token: decoders take the space of a text's first token away.
        before = str(self._backend.decode([self.eos_id], skip_special_tokens=False))
        joined = self._backend.decoder is None  # which writes a space between any two tokens
        return whole[len(before) + joined :] if ids else ""

    def _within_patience(self, texts: Sequence[str]) -> list[Any]:
        """Encodes texts unless a regular expression of the file backtracks for too long. The
        library cannot be interrupted: after an error its thread computes on."""
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
            fault = f"{characters:,} characters took more than {patience_s:.0f} s: a regular expression"
            raise TooSlow(f"{fault} of the tokenizer may backtrack without end") from None
        if isinstance(answer, BaseException):
            raise NotEncodable(in_words(answer)) from answer
        return answer

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def _backend(content: bytes, path: Path) -> Any:
    backend = _parsed(content, path)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _parsed(content: bytes, path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    vocabulary(content, path)  # within limits that the library does not have
    try:
        return Backend.from_str(content.decode("utf-8"))
    except BaseException as error:  # the library raises no narrower type, and a panic is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        fault = f"{path} is not a tokenizer.json: {visible(in_words(error)[:_SHOWN])}"
        raise DataError(Problem("data.tokenizer", fault, "use a file that the tokenizers library can load")) from error


def _as_llama(backend: Any, spaces: str | None) -> list[str]:
    """Makes a backend encode as `LlamaTokenizer` of transformers 5. Returns what changed. That
    takes only vocabulary, merges and post-processor of a tokenizer.json."""
    from tokenizers import decoders, pre_tokenizers

    of_file = f"{backend.normalizer!r} {backend.pre_tokenizer!r}"
    if spaces is None or type(backend.model).__name__ != "BPE" or "ByteLevel" in of_file:
        return []
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=spaces, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spaces != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return [f"spaces {spaces}"] if f"{backend.normalizer!r} {backend.pre_tokenizer!r}" != of_file else []


def _add_special(backend: Any, named: SpecialTokens) -> list[str]:
    """Makes special what the files beside a tokenizer.json name, as transformers does. A name that
    the vocabulary lacks gets a new id. Returns what changed."""
    from tokenizers import AddedToken as Token

    tokens = backend.get_added_tokens_decoder().values()
    same, known = {repr(token) for token in tokens}, {token.content for token in tokens}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    new = []
    for _, token in sorted(named.added.items()):
        made = Token(token["content"], **{name: bool(token[name]) for name in flags if name in token})
        if repr(made) not in same:
            new.append(made)
            known.add(made.content)
    for text in (*(named.names[role] for role in ROLES if role in named.names), *named.others):
        if text not in known:
            new.append(Token(text, special=True, normalized=False))
            known.add(text)
    backend.add_tokens(new)
    return [repr(token) for token in new]


def _add_own(backend: Any, added: Sequence[AddedToken]) -> list[str]:
    """Adds a job's tokens; one that is there keeps id and settings. Returns what changed."""
    from tokenizers import AddedToken as Token

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    mine = [one for one in added if one.text not in known]
    new = [Token(one.text, special=one.special, normalized=not one.special) for one in mine]
    backend.add_tokens(new)
    return [repr(token) for token in new]


def with_added_tokens(content: bytes, path: Path, added: Sequence[AddedToken]) -> bytes:
    """Returns a tokenizer.json with more tokens, with the ids of `FileTokenizer`."""
    backend = _parsed(content, path)
    _add_special(backend, special_tokens(path.parent))
    _add_own(backend, added)
    return str(backend.to_str(pretty=True)).encode()


def added_in(data: Mapping[str, Any]) -> list[AddedToken]:
    """Returns the `added_tokens` of a stored job's `data:`. Raises JobError: they are invalid."""
    return parse_job({"name": "run", "data": {"added_tokens": data.get("added_tokens") or []}}).data.added_tokens


def _around(backend: Any, template: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that a post-processor adds before and after a text."""
    if template is None:
        return (), ()
    for probe in ("a", *islice(backend.get_vocab(), 8)):
        plain = backend.encode(probe, add_special_tokens=False)
        if plain.ids:
            whole = template.process(plain, None, True)
            begin = whole.special_tokens_mask.index(0)
            return tuple(whole.ids[:begin]), tuple(whole.ids[begin + len(plain.ids) :])
    return (), ()


def open_tokenizer(name: str, add_bos: AddBos = "auto", added: Sequence[AddedToken] = ()) -> PromptTokenizer:
    """Opens the tokenizer `bytes`, or the one in a file or folder, with `added` tokens. Raises
    DataError: a file is missing or invalid, or has no end-of-text token, or no beginning to add."""
    if name != "bytes":
        return FileTokenizer(tokenizer_path(name), add_bos, added)
    if add_bos is True:
        fault = "the bytes tokenizer has no token for the beginning of a text"
        raise DataError(Problem("data.add_bos", fault, "leave it out, or set data.tokenizer to a file"))
    return ByteTokenizer()


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> list[Problem]:
    """Checks that the ids that belong around every text have a row in the embedding. Those of the
    texts are checked as they are encoded. Returns the problems."""
    fault = lacking(tokenizer, [*tokenizer.before, *tokenizer.after, tokenizer.eos_id], vocab_size)
    if not fault:
        return []
    fix = f"set model.vocab_size to at least {tokenizer.vocab_size}, or use the model's own tokenizer"
    return [Problem("model.vocab_size", f"every text gets {fault}", fix)]


def lacking(tokenizer: Tokenizer, ids: Sequence[int] | NDArray[Any], vocab_size: int) -> str:
    """Returns the token among ids that a model has no row for, in words; empty if there is none."""
    if tokenizer.vocab_size <= vocab_size or not len(ids) or (most := int(np.max(ids))) < vocab_size:
        return ""
    return f"the token {visible(tokenizer.shown([most]))!r} (id {most}), but model.vocab_size is {vocab_size}"
