"""The shapes of rows: plain text, conversations in two spellings, a prompt and its completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypp.untrusted.text import visible

MOST_MESSAGES = 2000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of `messages`."""
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role of each `from` of `conversations`."""
_SHOWN, _LONGEST = 8, 60


class RowFault(Exception):
    """A row cannot be used.

    Attributes:
        what: What is wrong with it.
        fix: What the user can do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)  # both: it travels between processes
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Conversation:
    """Turns, each with a `role`, and the JSON schemas of the tools that the model may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Completion:
    """A text and what the model should write after it."""

    prompt: str
    completion: str


def parse_row(row: Mapping[str, Any], text_key: str | None) -> Conversation | Completion | str:
    """Returns what a row holds, by the first keys it has.

    `messages`; `conversations`; `prompt` and `completion`; the text key.

    Args:
        row: Plain values of JSON.
        text_key: Field of plain text; None: plain text is refused.

    Raises:
        RowFault: It has none of these shapes.
    """
    if "messages" in row:
        return Conversation(_messages(row["messages"]), _tools(row.get("tools")))
    if "conversations" in row:
        return Conversation(_from_speakers(row["conversations"]), _tools(row.get("tools")))
    if "prompt" in row and "completion" in row:
        return Completion(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))
    if text_key is not None and text_key in row:
        return _text(row, text_key)
    keys = ", ".join(_named(key) for key in islice(row, _SHOWN)) or "no keys"
    plain = f", nor {_named(text_key)}" if text_key is not None else ""
    raise RowFault(
        f"has neither messages, nor conversations, nor prompt and completion{plain} (it has {keys})",
        "rename the field that holds the conversation" if text_key is None else "set data.text_key to the field",
    )


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has the keys of a conversation, or of a prompt and its completion."""
    return "messages" in row or "conversations" in row or {"prompt", "completion"} <= row.keys()


def _messages(found: Any) -> list[dict[str, Any]]:
    turns = _turns(found, "messages")
    for index, turn in enumerate(turns):
        role = turn.get("role")
        if role not in ROLES:
            raise _unknown(f"messages[{index}]", "role", turn, ROLES)
        content = turn.get("content")
        if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
            what = f"messages[{index}] ({role}): content is {_kind(content)}, not a text"
            raise RowFault(what, "write content as a string; only a turn with tool_calls may have none")
    return turns


def _from_speakers(found: Any) -> list[dict[str, Any]]:
    messages = []
    for index, turn in enumerate(_turns(found, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise _unknown(f"conversations[{index}]", "from", turn, tuple(SPEAKERS))
        if not isinstance(value, str):
            what = f"conversations[{index}] ({speaker}): value is {_kind(value)}, not a text"
            raise RowFault(what, "write value as a string")
        messages.append({"role": SPEAKERS[speaker], "content": value})
    return messages


def _turns(found: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(found, list):
        raise RowFault(f"{key} is {_kind(found)}, not a list", "write a list of turns")
    if not found:
        raise RowFault(f"{key} is empty", "remove the row")
    if len(found) > MOST_MESSAGES:
        raise RowFault(f"{key} has {len(found):,} turns; at most {MOST_MESSAGES:,} are read", "split it")
    wrong = next((index for index, turn in enumerate(found) if not isinstance(turn, dict)), None)
    if wrong is not None:
        raise RowFault(f"{key}[{wrong}] is {_kind(found[wrong])}, not an object", "write each turn as {…}")
    return found


def _tools(found: Any) -> list[Any] | None:
    if isinstance(found, str) and found.strip():  # some data sets keep them as text
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise RowFault("tools is a text that is not JSON", "write a list of JSON schemas") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise RowFault(f"tools is {_kind(found)}, not a list of objects", "write a list of JSON schemas")
    return found


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    text = row[key]
    if not isinstance(text, str):
        raise RowFault(f"{_named(key)} is {_kind(text)}, not a text", "write a string; turns belong under messages")
    if not text and not may_be_empty:
        raise RowFault(f"{_named(key)} is empty", "remove the row")
    return text


def _unknown(where: str, key: str, turn: Mapping[str, Any], known: tuple[str, ...]) -> RowFault:
    if key not in turn:
        keys = ", ".join(_named(name) for name in islice(turn, _SHOWN)) or "no keys"
        return RowFault(f"{where} has no {key} (it has {keys})", f"name who speaks: {', '.join(known)}")
    value = turn[key]
    said = _named(value) if isinstance(value, str) else _kind(value)
    return RowFault(f"{where}: there is no {key} {said}; there are: {', '.join(known)}", "rename it")


def _named(key: object) -> str:
    return repr(visible(str(key)[:_LONGEST]))


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
