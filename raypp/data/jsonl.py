"""JSON lines, or a JSON array: each object has a document's text under `data.text_key`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from raypp.data.conversations import RowFault, kind_of, shape_of
from raypp.data.corpus import Corpus
from raypp.data.json_rows import records_of
from raypp.data.source_files import SourceFile, find_files
from raypp.data.tokenised import Record, Request, Text, tokenise
from raypp.kinds import SourceKind
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
    """Reads all lines of all files, in order of file name; skips blank lines.

    Raises:
        DataError: No file, no line, or a line without such an object; names file and line.
    """
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: (text for file in files for text in _documents(file, request)))


def _documents(file: SourceFile, request: Request) -> Iterator[Text | Record]:
    for record in records_of(file):
        try:
            yield Text(record.place, _text(record, request.data.text_key))
        except RowFault as fault:
            yield Record(record.place, fault)


def _text(record: Record, key: str) -> str:
    if isinstance(record.row, RowFault):
        raise record.row
    text = record.row.get(key)
    if not isinstance(text, str):
        keys = ", ".join(repr(name[:_LONGEST_KEY]) for name in islice(record.row, _SHOWN))
        has = f"it has {keys or 'no keys'}" if key not in record.row else f"it is {kind_of(text)}"
        fix = "set data.text_key to the field that holds the text"
        if shape_of(record.row) is not None:
            fix = "set data.kind to chat, which reads conversations"
        raise RowFault(f"has no text under {key!r} ({has})", fix)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFault(f"the text is not valid Unicode: {visible(error.reason)}", "repair the line") from error
    return text
