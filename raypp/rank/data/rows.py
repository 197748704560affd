"""A row of data to token ids, and which of them carry loss. Reads no file.

`{% generation %}` marks say what the assistant writes. Without them prefixes are compared, or the
template's loop is followed. A loop in a macro cannot be: a guess would train on questions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raypp.rank.data.chat_template import ChatTemplate, Rendered, TemplateFault
from raypp.rank.data.conversations import Completion, Content, Conversation, Names, Segments, parse_row
from raypp.rank.data.faults import RowFault
from raypp.rank.data.tokenizer import NotEncodable, Tokenizer, Tokens, document_of, lacking
from raypp.untrusted.text import visible

VERSION = 2
"""Changes if the same row would give other tokens, or another loss."""
Loss = Literal["assistant", "last", "all"]
_Span = tuple[int, int]

_NO_TEXT = frozenset(("role", "content", "tool_call_id"))
"""Keys of turns that need not be in a template: the first two always are, the third is no text."""
_ANSWERS = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")
_NAMES = ("id", "type", "index")
"""Keys of calls that need not be in a text."""
_BY_LOOP = (
    "the chat template writes earlier turns otherwise when others follow; what its loop over messages writes of a "
    "turn carries loss"
)
_SILENT = frozenset({"an answer is empty: only its end is learnt"})
_MARK_IT = (
    "mark what the model writes in the template ({% generation %} … {% endgeneration %}, data.chat_template), "
    "or set data.loss to last or all"
)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A row as tokens. `ids`: token ids with what begins and ends the row, `[n]`. `loss`: whether
    each token carries loss, that is, whether the model learns to write it: bool `[n]`."""

    ids: NDArray[np.int64]
    loss: NDArray[np.bool_]
    text: str
    remarks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Text:
    """Text to tokenise, what of it carries loss, and whether beginning and end are added."""

    text: str
    spans: Sequence[_Span]
    framed: bool = False
    remarks: frozenset[str] = frozenset()


class RowEncoder:
    """Turns rows into tokens. Not thread-safe.

    A row has one of the shapes of `parse_row`. A conversation is rendered by the chat template
    alone. Text, and a prompt with its completion, which are one text, get what the tokenizer puts
    around a text, and the end id. A token with characters of both belongs to the completion.

    Args:
        template: The chat template; None: conversations are refused.
        loss: What of a conversation carries loss: all assistant turns, the last one, or all; turns
            that the row marks as not to be learnt carry none. Of a prompt with its completion it is
            the completion, unless it is "all". Of plain text it is all.
        vocab_size: Rows of the model's embedding; rows with other ids are refused. None: any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        loss: Loss = "assistant",
        names: Names | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer, self._template, self._loss = tokenizer, template, loss
        self._names = names or Names()
        self._vocab_size = vocab_size if vocab_size is not None else tokenizer.vocab_size

    @property
    def template(self) -> str:
        """A digest of the chat template; empty without one."""
        return self._template.identity if self._template is not None else ""

    @property
    def identity(self) -> str:
        """Changes if the tokens of a row would, or their loss; without the tokenizer's identity."""
        names = [sorted(self._names.columns.items()), sorted(self._names.roles.items())]
        return f"{VERSION}-{self.template}-None-{self._loss}-{names}"

    def encode(self, rows: Sequence[Mapping[str, Any] | RowFault]) -> list[Encoded | RowFault]:
        """Returns the tokens of each row, or what is wrong with it."""
        texts = [self._text(row) for row in rows]
        tokens = iter(self._tokens([one.text for one in texts if not isinstance(one, RowFault)]))
        return [one if isinstance(one, RowFault) else self._encoded(one, next(tokens)) for one in texts]

    def _text(self, row: Mapping[str, Any] | RowFault) -> _Text | RowFault:
        if isinstance(row, RowFault):
            return row
        try:
            content, unused = parse_row(row, self._names, chat=self._template is not None)
            text = self._parsed(content)
            text.text.encode()
        except RowFault as fault:
            return fault
        except TemplateFault as fault:
            return RowFault(str(fault), "repair the row, or the template")
        except UnicodeEncodeError as error:
            return RowFault(f"the text is not valid Unicode: {visible(error.reason)}", "repair the row")
        return replace(text, remarks=text.remarks | {f"column {key} is not used" for key in unused})

    def _parsed(self, content: Content) -> _Text:
        if isinstance(content, str):
            return _Text(content, [(0, len(content))], framed=True)
        if isinstance(content, Completion):
            whole = content.prompt + content.completion
            spans = [(0 if self._loss == "all" else len(content.prompt), len(whole))]
            return _Text(whole, spans, framed=True, remarks=frozenset() if content.completion else _SILENT)
        if isinstance(content, Segments):
            ends = accumulate(len(text) for text, _ in content.texts)
            spans = [(end - len(text), end) for (text, learnt), end in zip(content.texts, ends, strict=True) if learnt]
            return _Text("".join(text for text, _ in content.texts), spans)
        if self._template is None:
            raise RowFault("is a conversation, and there is no chat template", "set data.chat_template")
        turns = _Turns(self._template, content)
        return _Text(turns.rendered.text, turns.learnt(self._loss), remarks=frozenset(turns.remarks))

    def _tokens(self, texts: Sequence[str]) -> list[Tokens | RowFault]:
        try:
            return list(self._tokenizer.encode_with_offsets(texts))
        except NotEncodable as error:
            if len(texts) == 1:
                return [RowFault(f"the tokenizer cannot encode it: {error}", "remove it, or use another tokenizer")]
            return [one for text in texts for one in self._tokens([text])]

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
        if fault := lacking(self._tokenizer, ids, self._vocab_size):
            fix = f"set model.vocab_size to at least {self._tokenizer.vocab_size}, or use the model's own tokenizer"
            return RowFault(f"has {fault}", fix)
        if not loss.any():
            return RowFault("no token carries loss", _MARK_IT)
        return Encoded(ids, loss, text.text, text.remarks)


class _Turns:
    """A rendered conversation, and where its turns are in the text. `rendered`: the whole of it.
    `remarks`: what the template does not write of it, and which turns its loop had to tell."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template, self._conversation = template, conversation
        self._messages, self._tools = conversation.messages, conversation.tools
        self._assistant = [index for index, turn in enumerate(self._messages) if turn["role"] == "assistant"]
        self.rendered = self._render(len(self._messages))
        self.remarks = self._unread() | self._unwritten()
        if any(not any(turn.get(key) for key in _ANSWERS) for turn in map(self._messages.__getitem__, self._assistant)):
            self.remarks |= _SILENT

    def learnt(self, loss: Loss) -> list[_Span]:
        """Returns the parts that carry loss."""
        refused = {index for index, mark in enumerate(self._conversation.marks) if mark is False}
        if loss == "all":
            return _without((0, len(self.rendered.text)), self._parts(sorted(refused)))
        turns = [index for index in self._assistant if index >= self._conversation.begin]
        if not turns:
            raise RowFault("has no assistant turn: nothing carries loss", "remove the row, or set data.loss to all")
        wanted = [index for index in (turns[-1:] if loss == "last" else turns) if index not in refused]
        if not wanted:
            which = "its last assistant turn is" if loss == "last" else "all its assistant turns are"
            raise RowFault(f"{which} marked as not to be learnt: nothing carries loss", "remove the row")
        return self._parts(wanted)

    def _unread(self) -> set[str]:
        """Remarks what the template does not write, because it does not know the name."""
        keys = {key for turn in self._messages for key, value in turn.items() if value is not None} - _NO_TEXT
        unread = {f"key {visible(key)} of turns" for key in keys if not self._template.reads(key, self._tools)}
        if self._tools and not self._template.reads("tools", self._tools):
            unread.add("column tools")
        return {f"{one} is not used: the chat template does not read it" for one in unread}

    def _unwritten(self) -> set[str]:
        """Remarks texts of turns that the template reads, but does not write as they are."""
        text, at, unwritten = self.rendered.text, 0, set()
        for turn in self._messages:
            for key, value in turn.items():
                if key in ("role", "tool_call_id") or not self._template.reads(key, self._tools):
                    continue
                for one in _texts_in(value):
                    found = next(
                        (p for shown in _spellings(one) for s in (at, 0) if (p := text.find(shown, s)) >= 0), -1
                    )
                    if found < 0:
                        unwritten.add(f"{key} of {turn['role']} turns{_thought(one, text)} is not in the text")
                    at = max(at, found)
        return {f"{visible(one)}: the chat template leaves it out, or changes it" for one in unwritten}

    def _render(self, turns: int, *, header: bool = False) -> Rendered:
        """Renders the first turns, and the header of the assistant's next one."""
        messages = self._messages[:turns]
        return self._template.render(messages, self._tools, add_generation_prompt=header)

    def _parts(self, wanted: Sequence[int]) -> list[_Span]:
        """Returns the parts of the text that are some of the turns."""
        if not wanted:
            return []
        if not self._template.marks_turns(self._tools):
            return [self._part(index) for index in wanted]
        if not any(end > start for start, end in self.rendered.spans):
            raise RowFault("the template's {% generation %} marks nothing", "repair the template")
        marked = self._marked(wanted)
        return [span for index in wanted for span in (marked[index] if index in marked else [self._part(index)])]

    def _marked(self, wanted: Sequence[int]) -> dict[int, list[_Span]]:
        """Returns the parts that the template marks, by the assistant's turn that they belong to. A
        turn has the marks that are there with it and not without it."""
        turns, spans = self._assistant, list(self.rendered.spans)
        if wanted == turns:
            return {turns[0]: spans} | {index: [] for index in turns[1:]}
        if wanted == turns[-1:] and len(spans) == len(turns):
            return {turns[-1]: spans[-1:]}
        counts = [0]
        for index in turns:
            last = index + 1 == len(self._messages)
            counts.append(len((self.rendered if last else self._render(index + 1)).spans))
        if counts != sorted(counts) or counts[-1] != len(spans):
            raise RowFault("the template's {% generation %} does not mark turn by turn", "repair the template")
        return {index: spans[begin:end] for index, (begin, end) in zip(turns, pairwise(counts), strict=True)}

    def _part(self, index: int) -> _Span:
        """Finds a turn by the text that is there with it and not without it, or, if a template
        writes it otherwise when others follow, as what its iteration of the loop wrote."""
        try:
            return self._part_by_prefix(index)
        except RowFault:
            if (turn := self.rendered.turns.get(index)) is None:
                raise
            self.remarks.add(_BY_LOOP)
            start, end = turn
            last = len(self._messages) - 1
            if index in self._assistant:
                whole = self._render(last + 1, header=True)
                header = whole.text[whole.turns[last][1] :] if last in whole.turns else ""
                start += _header_size(header, self.rendered.text[start:end])
            return start, len(self.rendered.text) if index == last else end

    def _part_by_prefix(self, index: int) -> _Span:
        """Finds a turn by rendering the conversation up to it, without it and with it."""
        whole, last = self.rendered.text, index + 1 == len(self._messages)
        until = whole if last else self._render(index + 1).text
        try:
            opened, before = (self._render(index, header=header).text for header in (True, False))
        except TemplateFault as fault:
            why = f"the template does not render what is before messages[{index}]: {fault}"
            raise RowFault(why, _MARK_IT) from None
        start = None
        if until.startswith(before):
            start = len(before)
        if index in self._assistant:
            if until.startswith(opened):
                start = len(opened)
            elif start is not None and opened.startswith(before):
                start += _header_size(opened[start:], until[start:])
        if start is None or not whole.startswith(until):
            problem = f"the template cannot mark turns: messages[:{index + (start is not None)}] alone is not rendered "
            raise RowFault(problem + "as the whole conversation begins", _MARK_IT)
        return start, len(until)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from [value.strip()] if value.strip() else []
    elif isinstance(value, dict | list):
        for one in [one for key, one in value.items() if key not in _NAMES] if isinstance(value, dict) else value:
            yield from _texts_in(one)


def _spellings(text: str) -> Iterator[str]:
    """Yields a text as it is, and as a JSON text has it."""
    yield text
    yield from (json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True))


def _thought(content: str, text: str) -> str:
    """Returns what of a content is not in the text, if it is the reasoning."""
    before, mark, after = content.rpartition("</think>")
    return " before </think>" if before and mark and after.strip() in text else ""


def _header_size(header: str, turn: str) -> int:
    """Returns how much of a turn is the header that the model is given. A template may open
    reasoning in the header, and leave that out of earlier turns."""
    size = next((i for i, (a, b) in enumerate(zip(header, turn, strict=False)) if a != b), min(len(header), len(turn)))
    while 0 < size < len(header) and turn[size - 1].isalnum():
        size -= 1  # not a part of a word
    return size


def _without(whole: _Span, others: Sequence[_Span]) -> list[_Span]:
    """Returns what remains of a part without others, which are in order."""
    borders = [whole[0], *(border for span in others for border in span), whole[1]]
    return [(start, end) for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end]


def _overlap(tokens: Tokens, text: _Text) -> NDArray[np.bool_]:
    """Returns which tokens stand for a character of one of the text's spans, bool `[n]`. A span
    over the whole text also has the tokens that stand for no character."""
    inside = np.zeros(len(tokens.ids), dtype=bool)
    for start, end in text.spans:
        inside |= (tokens.starts < end) & (tokens.ends > start) | (end - start == len(text.text))
    return inside
