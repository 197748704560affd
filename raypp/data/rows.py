"""A row of data to token ids, and which of them carry loss. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raypp.data.chat_template import ChatTemplate, Rendered, TemplateFault
from raypp.data.conversations import Completion, Conversation, RowFault, parse_row
from raypp.data.template_limits import deadline
from raypp.data.tokenizer import NotEncodable, Tokenizer, Tokens, document_of, lacking
from raypp.untrusted.text import visible

VERSION = 2
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
        ids: Token ids with what begins and ends the row, `[n]`.
        loss: Whether each token carries loss, that is, whether the model learns to write it: bool
            `[n]`.
        text: What was tokenised.
    """

    ids: NDArray[np.int64]
    loss: NDArray[np.bool_]
    text: str


@dataclass(frozen=True)
class _Text:
    """Text to tokenise, what of it carries loss, and whether beginning and end are added."""

    text: str
    spans: Sequence[tuple[int, int]]
    framed: bool = False


class RowEncoder:
    """Turns rows into tokens. Not thread-safe.

    A row has one of the shapes of `parse_row`. A conversation is rendered by the chat template;
    nothing is added to it. Text, and a prompt with its completion, which are one text, get what the
    tokenizer puts around a text, and the end id. A token with characters of prompt and completion
    belongs to the completion.

    Args:
        tokenizer: The job's tokenizer.
        template: The chat template; None: conversations are refused.
        text_key: Field of plain text; None: plain text is refused.
        loss: What of a conversation carries loss: all assistant turns, the last one, or all. Of a
            prompt with its completion it is the completion, unless it is "all". Of plain text it is
            all.
        vocab_size: Rows of the model's embedding; rows with other ids are refused. None: any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        text_key: str | None = None,
        loss: Loss = "assistant",
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer, self._template, self._text_key, self._loss = tokenizer, template, text_key, loss
        self._vocab_size = vocab_size if vocab_size is not None else tokenizer.vocab_size

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
        found = [self._text(row) for row in rows]
        tokens = iter(self._tokens([one.text for one in found if not isinstance(one, RowFault)]))
        return [one if isinstance(one, RowFault) else self._encoded(one, next(tokens)) for one in found]

    def _text(self, row: Mapping[str, Any] | RowFault) -> _Text | RowFault:
        if isinstance(row, RowFault):
            return row
        try:
            found = self._parsed(parse_row(row, self._text_key))
            found.text.encode()
        except RowFault as fault:
            return fault
        except TemplateFault as fault:
            return RowFault(str(fault), "repair the row, or the template")
        except UnicodeEncodeError as error:
            return RowFault(f"the text is not valid Unicode: {visible(error.reason)}", "repair the row")
        return found

    def _parsed(self, found: Conversation | Completion | str) -> _Text:
        if isinstance(found, str):
            return _Text(found, [(0, len(found))], framed=True)
        if isinstance(found, Completion):
            whole = found.prompt + found.completion
            return _Text(whole, [(0 if self._loss == "all" else len(found.prompt), len(whole))], framed=True)
        if self._template is None:
            raise RowFault("is a conversation, and there is no chat template", "set data.chat_template")
        self._until = deadline()
        rendered = self._render(found, len(found.messages))
        spans = [(0, len(rendered.text))] if self._loss == "all" else self._turns(found, rendered)
        return _Text(rendered.text, spans[-1:] if self._loss == "last" else spans)

    def _render(self, found: Conversation, turns: int, *, header: bool = False) -> Rendered:
        """Renders the first turns, and the header of the assistant's next one."""
        assert self._template is not None
        return self._template.render(
            found.messages[:turns], found.tools, add_generation_prompt=header, until=self._until
        )

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
        last = index + 1 == len(found.messages)
        until = whole if last else self._render(found, index + 1).text
        try:
            start = next(
                (
                    len(before)
                    for header in (True, False)
                    if until.startswith(before := self._render(found, index, header=header).text)
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

    def _tokens(self, texts: Sequence[str]) -> list[Tokens | RowFault]:
        try:
            return list(self._tokenizer.encode_with_offsets(texts))
        except NotEncodable as error:
            if len(texts) == 1:
                return [RowFault(f"the tokenizer cannot encode it: {error}", "remove it, or use another tokenizer")]
            return [found for text in texts for found in self._tokens([text])]

    def _encoded(self, text: _Text, tokens: Tokens | RowFault) -> Encoded | RowFault:
        if isinstance(tokens, RowFault):
            return tokens
        if text.framed and not len(tokens.ids):
            return RowFault("is a document without a token", "remove it")
        ids, loss = tokens.ids, _overlap(tokens, text)
        if text.framed:
            ids, before = document_of(self._tokenizer, ids)
            added = len(ids) - len(loss) - before
            loss = np.concatenate([np.zeros(before, dtype=bool), loss, np.ones(added, dtype=bool)])
        if what := lacking(self._tokenizer, ids, self._vocab_size):
            return RowFault(f"has {what}", "use the model's own tokenizer, or raise model.vocab_size")
        return Encoded(ids, loss, text.text) if loss.any() else RowFault("no token carries loss", _MARK_IT)


def _overlap(tokens: Tokens, text: _Text) -> NDArray[np.bool_]:
    """Returns which tokens stand for a character of one of the text's spans, bool `[n]`.

    A span over the whole text also has the tokens that stand for no character.
    """
    found = np.zeros(len(tokens.ids), dtype=bool)
    for start, end in text.spans:
        found |= (tokens.starts < end) & (tokens.ends > start) | (end - start == len(text.text))
    return found
