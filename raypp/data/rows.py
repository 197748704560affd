"""A row of data to token ids, and which of them carry loss. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raypp.data.chat_template import ChatTemplate, Rendered, TemplateFault
from raypp.data.conversations import Completion, Conversation, RowFault, parse_row
from raypp.data.tokenizer import NotEncodable, Tokenizer, Tokens
from raypp.untrusted.text import visible

VERSION = 1
"""Changes if the same row would give other tokens, or another loss."""
Loss = Literal["assistant", "last", "all"]

_MARK_IT = (
    "mark what the model writes in the template ({% generation %} … {% endgeneration %}, data.chat_template), "
    "or set data.loss to last or all"
)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A row as tokens.

    Attributes:
        ids: Token ids with what ends the row, `[n]`.
        loss: Whether each token carries loss, that is, whether the model learns to write it: bool
            `[n]`.
        text: What was tokenised.
    """

    ids: NDArray[np.int64]
    loss: NDArray[np.bool_]
    text: str


@dataclass(frozen=True)
class _Part:
    """Text to tokenise, the parts of it that carry loss, and whether the end id follows."""

    text: str
    spans: Sequence[tuple[int, int]]
    ends: bool = False


class RowEncoder:
    """Turns rows into tokens. Not thread-safe.

    A row has one of the shapes of `parse_row`. A conversation is rendered by the chat template; the
    end id is not appended. Text, and a prompt with its completion, get the end id.

    Args:
        tokenizer: The job's tokenizer.
        template: The chat template; None: conversations are refused.
        text_key: Field of plain text; None: plain text is refused.
        loss: What of a conversation carries loss: all assistant turns, the last one, or all. Of a
            prompt with its completion it is the completion, unless it is "all". Of plain text it is
            all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        text_key: str | None = None,
        loss: Loss = "assistant",
    ) -> None:
        self._tokenizer, self._template, self._text_key, self._loss = tokenizer, template, text_key, loss

    @property
    def template(self) -> str:
        """A digest of the chat template; empty without one."""
        return self._template.identity if self._template is not None else ""

    @property
    def identity(self) -> str:
        """Changes if the tokens of a row would, or their loss; without the tokenizer's identity."""
        return f"{VERSION}-{self.template}-{self._text_key}-{self._loss}"

    def encode(self, rows: Sequence[Mapping[str, Any] | RowFault]) -> list[Encoded | RowFault]:
        """Returns the tokens of each row, or what is wrong with it.

        Args:
            rows: Plain values of JSON. A fault is returned as it is.
        """
        found: list[list[_Part] | RowFault] = [self._parts(row) for row in rows]
        parts = [part for row in found if not isinstance(row, RowFault) for part in row]
        tokens = iter(self._tokens([part.text for part in parts]))
        return [row if isinstance(row, RowFault) else self._joined(row, [next(tokens) for _ in row]) for row in found]

    def _parts(self, row: Mapping[str, Any] | RowFault) -> list[_Part] | RowFault:
        if isinstance(row, RowFault):
            return row
        try:
            parts = self._parsed(parse_row(row, self._text_key))
            for part in parts:
                part.text.encode()
        except RowFault as fault:
            return fault
        except TemplateFault as fault:
            return RowFault(str(fault), "repair the row, or the template")
        except UnicodeEncodeError as error:
            return RowFault(f"the text is not valid Unicode: {visible(error.reason)}", "repair the row")
        return parts

    def _parsed(self, found: Conversation | Completion | str) -> list[_Part]:
        if isinstance(found, str):
            return [_Part(found, [(0, len(found))], ends=True)]
        if isinstance(found, Completion):
            learnt = [(0, len(found.prompt))] if self._loss == "all" else []
            whole = (0, len(found.completion))
            return [_Part(found.prompt, learnt), _Part(found.completion, [whole], ends=True)]
        if self._template is None:
            raise RowFault("is a conversation, and there is no chat template", "set data.chat_template")
        rendered, spans = self._template.render(found.messages, found.tools), None
        if self._loss == "all":
            spans = [(0, len(rendered.text))]
        else:
            spans = self._turns(found, rendered)
            if self._loss == "last":
                spans = spans[-1:]
        return [_Part(rendered.text, spans)]

    def _turns(self, found: Conversation, rendered: Rendered) -> list[tuple[int, int]]:
        """Returns the parts of a rendered conversation that the assistant wrote."""
        turns = [index for index, turn in enumerate(found.messages) if turn["role"] == "assistant"]
        if not turns:
            raise RowFault("has no assistant turn: nothing carries loss", "remove the row, or set data.loss to all")
        assert self._template is not None
        if self._template.marks_turns(found.tools):
            if not any(end > start for start, end in rendered.spans):
                raise RowFault("the template's {% generation %} marks nothing", "repair the template")
            return list(rendered.spans)
        wanted = turns[-1:] if self._loss == "last" else turns
        return [self._turn(found, rendered.text, index) for index in wanted]

    def _turn(self, found: Conversation, whole: str, index: int) -> tuple[int, int]:
        """Finds a turn by rendering the conversation up to it, without it and with it."""
        assert self._template is not None
        last = index + 1 == len(found.messages)
        until = whole if last else self._template.render(found.messages[: index + 1], found.tools).text
        try:
            start = next(
                (
                    len(before)
                    for header in (True, False)
                    if until.startswith(before := self._before(found, index, add_generation_prompt=header))
                ),
                None,
            )
        except TemplateFault as fault:
            raise RowFault(
                f"the template does not render what is before messages[{index}]: {fault}", _MARK_IT
            ) from None
        if start is None or not whole.startswith(until):
            what = f"the template cannot mark turns: messages[:{index + (start is not None)}] alone is not rendered "
            raise RowFault(what + "as the whole conversation begins", _MARK_IT)
        return start, len(until)

    def _before(self, found: Conversation, index: int, *, add_generation_prompt: bool) -> str:
        assert self._template is not None
        return self._template.render(
            found.messages[:index], found.tools, add_generation_prompt=add_generation_prompt
        ).text

    def _tokens(self, texts: Sequence[str]) -> list[Tokens | RowFault]:
        try:
            return list(self._tokenizer.encode_with_offsets(texts))
        except NotEncodable as error:
            if len(texts) == 1:
                return [RowFault(f"the tokenizer cannot encode it: {error}", "remove it, or use another tokenizer")]
            return [found for text in texts for found in self._tokens([text])]

    def _joined(self, parts: Sequence[_Part], tokens: Sequence[Tokens | RowFault]) -> Encoded | RowFault:
        ids, loss = [], []
        for part, found in zip(parts, tokens, strict=True):
            if isinstance(found, RowFault):
                return found
            ids.append(found.ids)
            loss.append(_overlap(found, part.spans))
            if part.ends:
                ids.append(np.array([self._tokenizer.eos_id]))
                loss.append(np.array([True]))
        joined = Encoded(np.concatenate(ids), np.concatenate(loss), "".join(part.text for part in parts))
        if len(joined.ids) == sum(part.ends for part in parts):
            return RowFault("is a document without a token", "remove it")
        if not joined.loss.any():
            return RowFault("no token carries loss", _MARK_IT)
        return joined


def _overlap(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Returns which tokens stand for a character of one of the spans, bool `[n]`."""
    found = np.zeros(len(tokens.ids), dtype=bool)
    for start, end in spans:
        found |= (tokens.starts < end) & (tokens.ends > start)
    return found
