"""JSON lines: each line is an object with a document's text under `data.text_key`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from raypp.data.conversations import RowFault, is_conversation
from raypp.data.corpus import Corpus
from raypp.data.json_rows import parse_object
from raypp.data.source_files import SourceFile, find_files
from raypp.data.tokenised import Request, Text, tokenise
from raypp.errors import DataError, Problem
from raypp.kinds import SourceKind
from raypp.untrusted.text import visible

KIND = SourceKind(
    "jsonl",
    "a JSON object per line; data.text_key holds the text",
    position=2,
    endings=(".jsonl", ".json", ".ndjson"),
    keys=("text_key",),
    compressed=True,
)

_SHOWN, _LONGEST_KEY = 8, 60


def read(request: Request) -> Corpus:
    """Reads all lines of all files, in order of file name; skips blank lines.

    Raises:
        DataError: No file, no line, or a line without such an object; names file and line.
    """
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: (text for file in files for text in _documents(file, request)))


def _documents(file: SourceFile, request: Request) -> Iterator[Text]:
    for number, line in file.lines():
        if line.strip():
            place = f"{file.name}:{number}"
            yield Text(place, _text(line, place, request))


def _text(line: str, place: str, request: Request) -> str:
    key = request.data.text_key
    try:
        entry = parse_object(line)
    except RowFault as fault:
        raise DataError(Problem(request.place, f"{place} {fault.what}", fault.fix)) from fault
    text = entry.get(key)
    if not isinstance(text, str):
        keys = ", ".join(repr(name[:_LONGEST_KEY]) for name in islice(entry, _SHOWN))
        has = f"it has {keys or 'no keys'}" if key not in entry else f"it is {type(text).__name__}"
        what = f"{place} has no text under {key!r} ({has})"
        fix = "set data.text_key to the field that holds the text"
        if is_conversation(entry):
            fix = "set data.kind to chat, which reads conversations"
        raise DataError(Problem(request.place, what, fix))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            Problem(
                request.place, f"{place}: the text is not valid Unicode: {visible(error.reason)}", "repair the line"
            )
        ) from error
    return text
