"""JSON lines, or a JSON array, of conversations, instructions, and prompts with completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raypp.data.chat_files import no_template, open_template
from raypp.data.conversations import Names, RowFault, needs_template
from raypp.data.corpus import Corpus
from raypp.data.jsonl import records_of
from raypp.data.rows import RowEncoder
from raypp.data.source_files import SourceFile, find_files
from raypp.data.tokenised import Record, Request, tokenise
from raypp.kinds import SourceKind

KIND = SourceKind(
    "chat",
    "a JSON object per line, or an array of them: conversations, instructions, prompts with completions",
    position=4,
    endings=(".jsonl", ".json", ".ndjson"),
    keys=("columns", "roles", "chat_template", "template_date", "loss"),
    compressed=True,
    first_rows=True,
)


def read(request: Request) -> Corpus:
    """Reads all lines of all files, in order of file name; skips blank lines.

    Raises:
        DataError: No file, no line, no chat template, or rows that cannot be used: the first of
            them, with file and line, and how many more.
    """
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: _records(files), _encoder(request, files))


def _encoder(request: Request, files: Sequence[SourceFile]) -> RowEncoder:
    template, names = open_template(request.data), Names.of(request.data)
    if template is None:
        first = next(_records(files), None)
        if first is not None and not isinstance(first.row, RowFault) and needs_template(first.row, names):
            raise no_template(request.data)
    return RowEncoder(request.tokenizer, template, loss=request.data.loss, names=names, vocab_size=request.vocab_size)


def _records(files: Sequence[SourceFile]) -> Iterator[Record]:
    return (record for file in files for record in records_of(file))
