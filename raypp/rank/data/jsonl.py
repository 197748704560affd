"""JSON lines, or a JSON array: each object has a document's text under `data.text_key`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from raypp.kinds import SourceKind
from raypp.rank.data.conversations import kind_of, shape_of
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.faults import RowFault
from raypp.rank.data.source_files import MOST_TEXT_BYTES, SourceFile, find_files, too_long
from raypp.rank.data.tokenised import Record, Request, Text, tokenise
from raypp.untrusted.text import visible

KIND = SourceKind(
    "jsonl",
    "a JSON object per line, or an array of them; data.text_key holds the text",
    position=2,
    endings=(".jsonl", ".json", ".ndjson"),
    keys=("text_key",),
    compressed=True,
    first_rows=True,
)

_SHOWN, _LONGEST_KEY = 8, 60


def read(request: Request) -> Corpus:
    """Reads all lines of all files, in order of file name; skips blank lines. Raises DataError: no
    file, no line, or a line without such an object; names file and line."""
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: (text for file in files for text in _documents(file, request)))


def _documents(file: SourceFile, request: Request) -> Iterator[Text | Record]:
    key = request.data.text_key
    for record in records_of(file):
        try:
            if isinstance(record.row, RowFault):
                raise record.row
            yield Text(record.place, _text(record.row, key), record.row.keys() - {key})
        except RowFault as fault:
            yield Record(record.place, fault)


def _text(row: Mapping[str, Any], key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        keys = ", ".join(repr(name[:_LONGEST_KEY]) for name in islice(row, _SHOWN))
        has = f"it has {keys or 'no keys'}" if key not in row else f"it is {kind_of(text)}"
        fix = "set data.text_key to the field that holds the text"
        if shape_of(row) is not None:
            fix = "set data.kind to chat, which reads conversations"
        raise RowFault(f"has no text under {key!r} ({has})", fix)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFault(f"the text is not valid Unicode: {visible(error.reason)}", "repair the line") from error
    return text


_LONG = 1 << 20
_MOST_VALUES = 8_000_000
"""Values of a line, and commas and brackets in its texts."""
_PIECES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"')
"""A text (which JSON keeps on one line), a bracket, or a text that does not end."""


def records_of(file: SourceFile) -> Iterator[Record]:
    """Yields a file's objects, one a line or in one array, with their places `file:line` or
    `file[index] (line n)`, or what is wrong with them. Blank lines are skipped."""
    lines = ((number, line) for number, line in file.lines() if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        yield from _elements(file, chain([first], lines))
        return
    if first[1].strip() == "{":
        fault = RowFault("is an object over several lines", "write each object on one line, or an array of them")
        yield Record(f"{file.name}:{first[0]}", fault)
        return
    for number, line in chain([first], lines):
        yield _record(f"{file.name}:{number}", line)


def _record(place: str, text: str) -> Record:
    try:
        return Record(place, _object(text))
    except RowFault as fault:
        return Record(place, fault)


def _object(line: str) -> dict[str, Any]:
    if len(line) > _LONG and (values := sum(map(line.count, ",[{"))) > _MOST_VALUES:
        raise RowFault(f"has about {values:,} values; at most {_MOST_VALUES:,} are read", "keep only the text")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"is not JSON: {visible(error)}", "repair or remove it") from error
    if not isinstance(entry, dict):
        raise RowFault("is not a JSON object", "each must be {…} with a text")
    return entry


def _elements(file: SourceFile, lines: Iterable[tuple[int, str]]) -> Iterator[Record]:
    """Yields the objects of an array, as soon as each has ended."""
    depth = index = begun = size = 0
    parts: list[str] = []
    between = ""
    number = 0

    def place(line: int) -> str:
        return f"{file.name}[{index}] (line {line})"

    for number, line in lines:
        at = 0  # where what is not kept yet begins
        for piece in _PIECES.finditer(line):
            kind = piece[0]
            if kind == '"':
                yield Record(place(number), RowFault("has a text that does not end on its line", "repair the file"))
                return
            if kind in "{[":
                depth += 1
                if depth == 2:
                    between += line[at : piece.start()]
                    if between.strip(" \t\r\n[") != ("," if index else ""):
                        yield Record(place(number), RowFault(*_between(between)))
                        return
                    between, parts, at, begun, size = "", [], piece.start(), number, 0
            elif kind in "}]":
                depth -= 1
                if depth == 1:
                    yield _record(place(begun), "\n".join([*parts, line[at : piece.end()]]))
                    index, at = index + 1, piece.end()
                if depth == 0:
                    between += line[at : piece.start()]
                    if between.strip(" \t\r\n["):
                        yield Record(place(number), RowFault(*_between(between)))
                    elif line[piece.end() :].strip() or next(iter(lines), None) is not None:
                        fault = RowFault("more follows after the array", "write one array, or one object a line")
                        yield Record(f"{file.name}:{number}", fault)
                    return
        if depth >= 2:
            parts.append(line[at:])
            size += len(line)
            if size > MOST_TEXT_BYTES:
                raise too_long(file.place, place(begun), "object")
        else:
            between += line[at:] + "\n"
    yield Record(place(number), RowFault("the array does not end", "copy the file again, or add the last ]"))


def _between(text: str) -> tuple[str, str]:
    """Returns what is wrong with a text between the objects of an array."""
    between = text.strip(" \t\r\n[,")
    if between:
        return f"is not a JSON object: {visible(between[:40])}", "each must be {…} with a text"
    return "is not JSON: a comma is missing, or one too many", "repair the file"
