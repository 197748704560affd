"""Prompts as text: from files to token ids, and from new tokens back to text. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import TypedDict

from raypp.errors import DataError, JobError, Problem
from raypp.rank.data.chat_files import learnt_ends, turn_ends
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.tokenizer import NotEncodable, PromptTokenizer, framed, lacking
from raypp.tools.inference.source import Source
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.files import read_file

MOST_NEW_TOKENS = 128
"""New tokens where the user does not say how many, and the context has room."""
_MOST_BYTES = 256 << 20
_LINE = Bounds(size=16 << 20)
_SHOWN = 5
_UNFINISHED = "\ufffd"


class _Row(TypedDict):
    prompt: str


@dataclass(frozen=True)
class Encoded:
    """A prompt. `limit`: the most new tokens."""

    text: str
    tokens: list[int]
    limit: int


def read_prompts(path: Path) -> list[str]:
    """Reads JSON lines, each with the key `prompt`. Skips blank lines. Raises DataError: the file
    is missing or empty, or lines are malformed; names the first ones."""
    prompts: list[str] = []
    problems: list[Problem] = []
    for number, line in enumerate(read_file(path, _MOST_BYTES, DataError, "--prompts").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fix = 'each line must be an object such as {"prompt": "Once upon a time"}'
            row = parse_as(_Row, line, f"{path}:{number}", _LINE, DataError, fix, unknown="ignore")
            prompts.append(row["prompt"])
        except DataError as error:
            problems.extend(error.problems[:1])
    if problems:
        raise DataError(_first(problems, Problem("--prompts", f"and {len(problems) - _SHOWN} more lines")))
    if not prompts:
        raise DataError(Problem("--prompts", f"{path} has no prompts", 'write lines such as {"prompt": "Hello"}'))
    return prompts


def _first(problems: list[Problem], more: Problem) -> list[Problem]:
    return problems if len(problems) <= _SHOWN else [*problems[:_SHOWN], more]


def encode_prompts(
    source: Source, tokenizer: PromptTokenizer, texts: Sequence[str], max_new_tokens: int | None
) -> list[Encoded]:
    """Encodes prompts, and checks that they and their answers fit into the model's context.
    `max_new_tokens`: the most new tokens. None: `MOST_NEW_TOKENS`, or fewer where the context ends.
    Raises JobError: a prompt is empty, cannot be encoded, or does not fit."""
    encoded: list[Encoded] = []
    problems: list[Problem] = []
    for number, text in enumerate(texts, start=1):
        place = "--prompt" if len(texts) == 1 else f"prompt {number}"
        try:
            whole, before = framed(tokenizer, ids := tokenizer.encode(text))
            # A run's texts end with the end id; transformers gets all that a tokenizer adds.
            tokens = (whole[: before + len(ids)] if source.run else whole).tolist()
        except (NotEncodable, UnicodeEncodeError) as error:
            problems.append(Problem(place, f"cannot be encoded: {error}", "change the prompt"))
            continue
        room = source.context - len(tokens)
        limit = min(MOST_NEW_TOKENS, room) if max_new_tokens is None else max_new_tokens
        if not tokens:
            problems.append(Problem(place, "is empty", "give at least one token"))
        elif fault := lacking(tokenizer, tokens, int(source.model["vocab_size"])):
            problems.append(Problem(place, f"has {fault}", "change the prompt"))
        elif room < 1:
            fault = f"has {len(tokens)} tokens, but the context of {source.place} ends at {source.context}"
            problems.append(Problem(place, fault, f"shorten it to {source.context - 1} tokens or less"))
        elif limit > room:
            fault = f"has {len(tokens)} tokens: with {limit} new ones it exceeds the context of {source.context}"
            problems.append(Problem(place, fault, f"use --max-new-tokens {room} or less"))
        encoded.append(Encoded(text, tokens, limit))
    if problems:
        raise JobError(_first(problems, Problem("", f"and {len(problems) - _SHOWN} more prompts")))
    return encoded


def encode_conversation(source: Source, tokenizer: PromptTokenizer, text: str, max_new_tokens: int | None) -> Encoded:
    """Encodes what a chat template has written, with all its special tokens. Raises JobError: it
    has no token, cannot be encoded, or its answer does not fit into the context."""
    try:
        tokens = tokenizer.encode(text).tolist()
    except (NotEncodable, UnicodeEncodeError) as error:
        raise JobError(Problem("--chat", f"the conversation cannot be encoded: {error}")) from error
    room = source.context - len(tokens)
    if not tokens or room < (max_new_tokens or 1):
        fault = f"the conversation has {len(tokens)} tokens, and the context of {source.place} ends at {source.context}"
        raise JobError(Problem("--chat", fault, "begin a new one"))
    return Encoded(text, tokens, max_new_tokens or min(MOST_NEW_TOKENS, room))


def end_ids(source: Source, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Returns the ids that end a text; for a run, those that its export has."""
    own: tuple[int, ...] = (tokenizer.eos_id,) if source.run or not source.eos_ids else ()
    own += learnt_ends((source.document or {}).get("data") or {}, tokenizer)
    return tuple(dict.fromkeys((*source.eos_ids, *own)))


def chat_end_ids(source: Source, tokenizer: PromptTokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """Returns the ids that end an answer: those of a text, and those of the ends of turns."""
    return tuple(dict.fromkeys((*end_ids(source, tokenizer), *turn_ends(template, tokenizer))))


@dataclass
class Answer:
    """A text as it is generated. `tokens`: the new ones, without an end. `finish`: `length` or
    `eos`; None: not yet. `stop`: a text that ends the answer, and is not part of it."""

    prompt: Encoded
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    shown: int = 0
    stop: str = ""

    def add(self, token: int, finish: str | None) -> None:
        if finish != "eos":
            self.tokens.append(token)
        self.finish = finish

    def text(self, tokenizer: PromptTokenizer) -> str:
        before = tokenizer.decode(self.prompt.tokens)
        whole = tokenizer.decode([*self.prompt.tokens, *self.tokens])
        # A tokenizer may write a word's space only where another word precedes it.
        text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(self.tokens)
        return text.partition(self.stop)[0] if self.stop else text

    def news(self, tokenizer: PromptTokenizer) -> str:
        """Returns the text since the last call, but half characters and what may become `stop`."""
        text = self.text(tokenizer)
        if self.finish is None:
            text = text.rstrip(_UNFINISHED)
            begun = next((n for n in range(len(self.stop) - 1, 0, -1) if text.endswith(self.stop[:n])), 0)
            text = text[: len(text) - begun]
        fresh, self.shown = text[self.shown :], max(self.shown, len(text))
        return fresh
