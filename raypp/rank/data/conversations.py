"""The shapes of rows: plain text, conversations, instructions, a prompt and its completion."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from raypp.job.job import DataSection
from raypp.rank.data.faults import RowFault
from raypp.untrusted.text import visible

MOST_MESSAGES = 2000
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""The role that a template knows, of each name that data have for it."""
_CALLS = ("function_call", "tool_call")
"""Names of turns whose text is the JSON of calls."""
MARKS = ("weight", "loss", "loss_weight", "train", "training")
"""Keys of a turn that say whether the model learns it."""
_OF_ANY_ROLE = ("train", "training")
_YES = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_PREFERENCES = ("chosen", "rejected", "rejected_response", "preferred_output", "non_preferred_output", "kto_tag")
_PLACES = ("messages", "conversations", "prompt", "completion", "instruction", "output", "segments", "text")
COLUMNS = (*_PLACES, "input", "history", "system", "tools")
"""Columns that `data.columns` can name."""
TURN_KEYS = ("role", "content")
"""Keys of turns that `data.columns` can name."""
READ = frozenset(
    [*COLUMNS, *_SYSTEM, *_MEDIA, *_PREFERENCES, "functions", "label", "completions", "chat_template_kwargs"]
)
"""Columns that decide what a row is."""
_SHOWN, _LONGEST = 8, 60
_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
)
_ALPACA_INPUT = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Names:
    """What the user's data call columns and roles. `columns`: the user's column, or key of a turn,
    of each of ours. `roles`: our role of each of the user's."""

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)

    @classmethod
    def of(cls, data: DataSection) -> Names:
        """Returns the names of `data.columns` and `data.roles`, and the usual ones."""
        mine: dict[str, str] = {}
        for role, named in data.roles.items():
            mine |= dict.fromkeys([named] if isinstance(named, str) else named, role)
        return cls({str(ours): theirs for ours, theirs in data.columns.items()}, ROLES | mine)

    def key(self, ours: str) -> str | None:
        """Returns the user's name of one of our columns; None if that column means another."""
        return self.columns.get(ours, None if ours in self.columns.values() else ours)


@dataclass(frozen=True)
class Conversation:
    """Turns, each with a `role`, and the JSON schemas of the tools that the model may call.
    `marks`: whether the model learns each turn, as the row says; None where it says nothing.
    `begin`: the first turn that the model may learn; those before it are a prompt."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    marks: tuple[bool | None, ...] = ()
    begin: int = 0


@dataclass(frozen=True)
class Completion:
    """A text and what the model should write after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Segments:
    """Texts that follow each other, and whether the model learns each."""

    texts: tuple[tuple[str, bool], ...]


Content = Conversation | Completion | Segments | str


class _Row:
    """A row by our names of columns; knows which were read."""

    def __init__(self, row: Mapping[str, Any], names: Names) -> None:
        self.row, self.names = row, names
        self.unread = set(row)

    def has(self, *keys: str) -> bool:
        return all((theirs := self.names.key(key)) is not None and theirs in self.row for key in keys)

    def get(self, key: str) -> Any:
        theirs = self.names.key(key)
        self.unread.discard(theirs or "")
        return self.row.get(theirs) if theirs is not None else None

    def called(self, key: str) -> str:
        return self.names.key(key) or key


def parse_row(row: Mapping[str, Any], names: Names = Names(), *, chat: bool = True) -> tuple[Content, set[str]]:
    """Returns what a row holds, and the columns that nothing reads. Its shape is the first whose
    columns it has; see `shape_of`. `chat`: an instruction becomes a conversation; otherwise a
    prompt in Alpaca's layout. Raises RowFault: it has none, or is of a kind not trained on."""
    shape = shape_of(row, names) or shape_of(dict.fromkeys(row, True), names)
    mine = _Row(row, names)
    if shape == ("text",):
        return _text(row, names.columns["text"]), set()
    _refuse(mine, shape)
    if shape is None:
        missing = [key for ours, key in names.columns.items() if ours not in TURN_KEYS and key not in row]
        keys = ", ".join(_named(key) for key in islice(row, _SHOWN)) or "no keys"
        if missing:
            fault = f"has no column {', '.join(map(_named, missing))} (it has {keys})"
            raise RowFault(fault, "name columns that the data have in data.columns")
        raise RowFault(
            "has neither messages, nor conversations, nor prompt and completion, nor instruction and output "
            f"(it has {keys})",
            "say which columns it has, for example data.columns: {prompt: question, completion: answer}",
        )
    content = _SHAPES[shape](mine, chat)
    return content, {key for key in mine.unread if row[key] is not None}


def shape_of(row: Mapping[str, Any], names: Names = Names()) -> tuple[str, ...] | None:
    """Returns the columns that say what a row is: the first of these that have values. `messages`;
    `conversations`; `prompt` and `completion`; `instruction` and `output`; `segments`. Those that
    `data.columns` names come first, and so does its `text`."""
    shapes = [*_SHAPES, *([("text",)] if "text" in names.columns else [])]
    shapes.sort(key=lambda shape: not any(key in names.columns for key in shape))
    keys = _Row(row, names)
    return next((shape for shape in shapes if keys.has(*shape) and all(keys.get(k) is not None for k in shape)), None)


def needs_template(row: Mapping[str, Any], names: Names) -> bool:
    """Whether a row is a conversation, which only a chat template makes text of."""
    shape = shape_of(row, names)
    mine = _Row(row, names)
    return shape in (("messages",), ("conversations",)) or (
        shape == ("prompt", "completion") and isinstance(mine.get("prompt"), list)
    )


def kind_of(value: Any) -> str:
    """Returns what a value of JSON is, in words."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")


def without_nulls(row: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Returns a row without the keys that are null, down to the innermost, but contents of turns. A
    column of objects in parquet has the keys of all rows' objects. A turn that only calls tools has
    a content of null, which templates write otherwise than a missing one."""
    kept = {"content", "value", names.columns.get("content")}

    def pruned(value: Any, kept: Collection[str | None] = ()) -> Any:
        if isinstance(value, dict):
            return {key: pruned(one) for key, one in value.items() if one is not None or key in kept}
        return [pruned(one, kept) for one in value] if isinstance(value, list) else value

    return {key: pruned(one, kept if isinstance(one, list) else ()) for key, one in row.items() if one is not None}


def _refuse(row: _Row, shape: tuple[str, ...] | None) -> None:
    """Refuses what would be left out of the text without a word."""
    for key in _MEDIA:
        if row.get(key):
            raise RowFault(f"has {_named(key)}: raypp trains on text only", "remove these rows, or their media")
    if row.get("chat_template_kwargs"):
        raise RowFault("has chat_template_kwargs, which raypp does not read", "write them into the template")
    if shape is not None and any(key in row.names.columns for key in shape):
        return  # the user said what of the row counts
    rated = [key for key in _PREFERENCES if row.row.get(key) is not None]
    rated += ["label"] if shape is not None and isinstance(row.row.get("label"), bool) else []
    rated += ["completions"] if shape is None and isinstance(row.row.get("completions"), list) else []
    if rated:
        raise RowFault(
            f"has {', '.join(map(_named, rated))}: raypp does not train on preferences or rated answers",
            "keep the good answers, as messages or completion; or name these columns in data.columns, "
            "for example data.columns: {messages: chosen}",
        )


def _conversation(key: str) -> Callable[[_Row, bool], Content]:
    def parsed(row: _Row, _: bool) -> Content:
        messages, marks = _turns(row.get(key), row.called(key), key, row.names)
        return _complete(row, messages, marks)

    return parsed


def _completion(row: _Row, chat: bool) -> Content:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        before, marks = _turns(prompt, row.called("prompt"), "messages", row.names)
        after, more = _turns(completion, row.called("completion"), "messages", row.names)
        return _complete(row, before + after, marks + more, begin=len(before))
    for key in ("system", "tools"):
        if row.get(key):
            fault = f"has {_named(row.called(key))} beside a prompt and its completion, which are plain text"
            raise RowFault(fault, "write it into the prompt, or use messages")
    return Completion(*(_text(row.row, row.called(key), may_be_empty=True) for key in ("prompt", "completion")))


def _instruction(row: _Row, chat: bool) -> Content:
    output = _text(row.row, row.called("output"), may_be_empty=True)
    row.get("instruction"), row.get("output")
    more = _text(row.row, row.called("input"), may_be_empty=True) if row.get("input") is not None else ""
    asked = _text(row.row, row.called("instruction"), may_be_empty=bool(more))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair) for pair in history
    ):
        raise RowFault("history is not a list of pairs of texts", 'write [["question", "answer"], …]')
    if not chat:
        if history:
            raise RowFault("has a history, and there is no chat template", "set data.chat_template")
        intro = _system(row) or _ALPACA.format(more=_ALPACA_INPUT if more else "")
        given = f"### Input:\n{more}\n\n" if more else ""
        return Completion(f"{intro}\n\n### Instruction:\n{asked}\n\n{given}### Response:\n", output)
    pairs = [*history, [f"{asked}\n{more}" if more else asked, output]]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return _complete(row, messages, (None,) * len(messages))


def _segments(row: _Row, _: bool) -> Content:
    segments = row.get("segments")
    if not isinstance(segments, list) or not segments:
        fault = f"segments is {kind_of(segments)}, not a list of objects"
        raise RowFault(fault, 'write [{"label": true, "text": "…"}]')
    for index, one in enumerate(segments):
        if not isinstance(one, dict) or not isinstance(one.get("text"), str) or not isinstance(one.get("label"), bool):
            fault = f"segments[{index}] is not an object with a text and a label of true or false"
            raise RowFault(fault, 'write it as {"label": true, "text": "…"}')
    return Segments(tuple((one["text"], one["label"]) for one in segments))


_SHAPES: dict[tuple[str, ...], Callable[[_Row, bool], Content]] = {
    ("messages",): _conversation("messages"),
    ("conversations",): _conversation("conversations"),
    ("prompt", "completion"): _completion,
    ("instruction", "output"): _instruction,
    ("segments",): _segments,
}


def _complete(
    row: _Row, messages: list[dict[str, Any]], marks: tuple[bool | None, ...], begin: int = 0
) -> Conversation:
    system = _system(row)
    if system:
        first = messages[0]
        if first["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
            marks, begin = (None, *marks), begin + bool(begin)
        elif first["content"] != system:
            fault = "has a system text of its own beside the turns, and another as the first turn"
            raise RowFault(fault, "keep one of them")
    tools, functions = _tools(row.get("tools"), "tools"), _tools(row.get("functions"), "functions")
    return Conversation(messages, tools or functions, marks, begin)


def _system(row: _Row) -> str:
    for key in _SYSTEM:
        text = row.get(key)
        if text is not None and not isinstance(text, str):
            raise RowFault(f"{_named(row.called(key))} is {kind_of(text)}, not a text", "write a string")
        if text:
            return text
    return ""


def _turns(value: Any, key: str, spelling: str, names: Names) -> tuple[list[dict[str, Any]], tuple[bool | None, ...]]:
    """Returns the turns with `role` and `content`, whatever the row calls them, and their marks."""
    usual = ("role", "content") if spelling == "messages" else ("from", "value")
    messages, marks = [], []
    for index, turn in enumerate(_listed(value, key)):
        role_key, content_key = (
            names.columns.get(ours) or next((one for one in (mine, ours, other) if turn.get(one) is not None), mine)
            for mine, ours, other in zip(usual, TURN_KEYS, ("from", "value"), strict=True)
        )
        speaker = turn.get(role_key)
        if not isinstance(speaker, str) or speaker not in names.roles:
            raise _unknown(f"{key}[{index}]", role_key, turn, names.roles)
        place, role = f"{key}[{index}] ({visible(speaker[:_LONGEST])})", names.roles[speaker]
        others = {name: one for name, one in turn.items() if name not in (role_key, content_key, *MARKS)}
        message = {"role": role, "content": turn.get(content_key), **_called(others, place)}
        if speaker in _CALLS and isinstance(message["content"], str):
            message |= {"content": None, "tool_calls": _calls_in(message["content"], f"{place}: {content_key}")}
        message["content"] = _content(message, place, content_key)
        if message["content"] is None and (content_key not in turn or turn[content_key] is not None):
            del message["content"]  # as the row has it
        messages.append(message)
        marks.append(_mark(turn, role, place))
    return messages, tuple(marks)


def _content(message: Mapping[str, Any], place: str, key: str) -> str | None:
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, list):
        fault = f"{place}: {key} is {kind_of(content)}, not a text"
        raise RowFault(fault, f"write {key} as a string; only a turn with tool_calls may have none")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            kind = f"of type {_named(kind)}" if isinstance(kind, str) and kind != "text" else "not a text"
            fix = 'raypp trains on text only: write {"type": "text", "text": "…"}, or remove the row'
            raise RowFault(f"{place}: {key}[{index}] is {kind}", fix)
        texts.append(part["text"])
    return "".join(texts)


def _mark(turn: Mapping[str, Any], role: str, place: str) -> bool | None:
    """Returns whether the model learns a turn, as its keys say; None if they say nothing."""
    if turn.get("train_detail"):
        raise RowFault(f"{place}: train_detail is not read", "split the turn, or use segments")
    marks = {}
    for key in MARKS:
        value = turn.get(key)
        if value is None:
            continue
        plain = value.strip().lower() if isinstance(value, str) else value
        if isinstance(plain, list | dict) or plain not in _YES:
            fault = f"{place}: {key} is {_named(value) if isinstance(value, str | int | float) else kind_of(value)}"
            raise RowFault(f"{fault}; a turn is learnt (1, true) or not (0, false)", "write 0 or 1")
        marks[key] = _YES[plain]
    if len(set(marks.values())) > 1:
        raise RowFault(f"{place}: {' and '.join(marks)} say the opposite", "keep one of them")
    mark = next(iter(marks.values()), None)
    if mark and role != "assistant":
        if any(key in marks for key in _OF_ANY_ROLE):
            fault = f"{place}: is marked to be learnt, and only what the assistant writes can be"
            raise RowFault(fault, "remove the mark, set data.loss to all, or use segments")
        return None
    return mark


def _called(turn: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the keys of a turn, with calls of tools as templates read them. Their arguments are
    objects; a `function_call` of older data is a call like others."""
    old = turn.pop("function_call", None)
    calls = turn.pop("tool_calls", None)
    if isinstance(calls, str) and calls.strip():
        calls = _json(calls, f"{place}: tool_calls")
    if old is not None:
        calls = [*(calls or []), {"type": "function", "function": old}]
    if not calls:
        return turn
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowFault(f"{place}: tool_calls is {kind_of(calls)}, not a list of objects", "write a list of calls")
    return {**turn, "tool_calls": [_call(call, f"{place}: tool_calls[{index}]") for index, call in enumerate(calls)]}


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    if (function := call.get("function")) is not None:
        if not isinstance(function, dict):
            raise RowFault(f"{place}.function is {kind_of(function)}, not an object", "write its name and arguments")
        return {**call, "function": _call(function, f"{place}.function")}
    given = call.get("arguments")
    if isinstance(given, str):
        given = _json(given, f"{place}.arguments") if given.strip() else {}
    if given is not None and not isinstance(given, dict):
        raise RowFault(f"{place}.arguments is {kind_of(given)}, not a JSON object", "write an object, or its JSON")
    return {**call, "arguments": given} if "arguments" in call else dict(call)


def _calls_in(text: str, place: str) -> list[dict[str, Any]]:
    """Returns the calls of a turn whose text is their JSON: an object, or a list of them."""
    value = _json(text, place)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        fault = f"{place} is not the JSON of a call"
        raise RowFault(fault, 'write {"name": "…", "arguments": {…}}, or a list of these')
    return [{"type": "function", "function": _call(call, place)} for call in calls]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowFault(f"{place} is a text that is not JSON", "write an object, or its JSON") from None


def _listed(value: Any, key: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # some data sets keep them as text
        value = _json(value, key)
    if not isinstance(value, list):
        raise RowFault(f"{key} is {kind_of(value)}, not a list", "write a list of turns")
    if not value:
        raise RowFault(f"{key} is empty", "remove the row")
    if len(value) > MOST_MESSAGES:
        raise RowFault(f"{key} has {len(value):,} turns; at most {MOST_MESSAGES:,} are read", "split it")
    wrong = next((index for index, turn in enumerate(value) if not isinstance(turn, dict)), None)
    if wrong is not None:
        raise RowFault(f"{key}[{wrong}] is {kind_of(value[wrong])}, not an object", "write each turn as {…}")
    return value


def _tools(value: Any, key: str) -> list[Any] | None:
    """Returns the schemas of tools; a bare function gets the wrapping that servers give it."""
    if isinstance(value, str) and value.strip():  # some data sets keep them as text
        value = _json(value, key)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(f"{key} is {kind_of(value)}, not a list of objects", "write a list of JSON schemas")
    bare = [isinstance(tool.get("name"), str) and not {"type", "function"} & tool.keys() for tool in value]
    return [{"type": "function", "function": tool} if one else tool for tool, one in zip(value, bare, strict=True)]


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    text = row[key]
    if not isinstance(text, str):
        raise RowFault(f"{_named(key)} is {kind_of(text)}, not a text", "write a string; turns belong under messages")
    if not text and not may_be_empty:
        raise RowFault(f"{_named(key)} is empty", "remove the row")
    return text


def _unknown(where: str, key: str, turn: Mapping[str, Any], known: Mapping[str, str]) -> RowFault:
    if key not in turn:
        keys = ", ".join(_named(name) for name in islice(turn, _SHOWN)) or "no keys"
        fix = f"name who speaks: {', '.join(known)}; or say which key does, data.columns: {{role: KEY}}"
        return RowFault(f"{where} has no {key} (it has {keys})", fix)
    value = turn[key]
    given = _named(value) if isinstance(value, str) else kind_of(value)
    fault = f"{where}: there is no {key} {given}; there are: {', '.join(known)}"
    return RowFault(fault, f"rename it, or say who that is, data.roles: {{user: {given}}}")


def _named(key: object) -> str:
    return repr(visible(str(key)[:_LONGEST]))
