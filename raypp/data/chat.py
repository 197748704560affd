"""JSON lines of conversations, and of prompts with their completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from raypp.data.chat_files import no_template, open_template
from raypp.data.conversations import RowFault
from raypp.data.corpus import Corpus
from raypp.data.faults import Faults
from raypp.data.json_rows import parse_object
from raypp.data.rows import RowEncoder
from raypp.data.source_files import SourceFile, find_files
from raypp.data.tokenised import Record, Request, tokenise
from raypp.errors import Problem
from raypp.kinds import SourceKind

KIND = SourceKind(
    "chat",
    "a JSON object per line: a conversation, or a prompt and its completion",
    position=4,
    endings=(".jsonl", ".json", ".ndjson"),
    keys=("chat_template", "template_date", "loss"),
    compressed=True,
    check="raypp.data.chat:check",
)

_CHECKED = 500  # rows


def read(request: Request) -> Corpus:
    """Reads all lines of all files, in order of file name; skips blank lines.

    Raises:
        DataError: No file, no line, no chat template, or rows that cannot be used: the first of
            them, with file and line, and how many more.
    """
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: _records(files), _encoder(request, files))


def check(request: Request) -> list[Problem]:
    """Returns the problems of the first rows."""
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    encoder, faults = _encoder(request, files), Faults(request.place)
    records = list(islice(_records(files), _CHECKED))
    for record, found in zip(records, encoder.encode([record.row for record in records]), strict=True):
        if isinstance(found, RowFault):
            faults.add(record.place, found)
    return faults.problems(whole=len(records) < _CHECKED)


def _encoder(request: Request, files: Sequence[SourceFile]) -> RowEncoder:
    template = open_template(request.data)
    if template is None:
        first = next(_records(files), None)
        if first is not None and not isinstance(first.row, RowFault) and "completion" not in first.row:
            raise no_template(request.data)
    return RowEncoder(request.tokenizer, template, loss=request.data.loss, vocab_size=request.vocab_size)


def _records(files: Sequence[SourceFile]) -> Iterator[Record]:
    for file in files:
        for number, line in file.lines():
            if line.strip():
                try:
                    yield Record(f"{file.name}:{number}", parse_object(line))
                except RowFault as fault:
                    yield Record(f"{file.name}:{number}", fault)
