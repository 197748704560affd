"""JSON lines, or a JSON array, of conversations, instructions, and prompts with completions."""

from collections.abc import Iterator, Sequence

from raypp.kinds import SourceKind
from raypp.rank.data.chat_files import row_encoder
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.jsonl import records_of
from raypp.rank.data.source_files import SourceFile, find_files
from raypp.rank.data.tokenised import Record, Request, tokenise

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
    """Reads all lines of all files, by name; skips blank lines. Raises DataError: no file, no line,
    no chat template, or rows that cannot be used: the first, with file and line, and how many."""
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    encoder = row_encoder(request, lambda: next((record.row for record in _records(files)), None))
    return tokenise(request, files, lambda: _records(files), encoder)


def _records(files: Sequence[SourceFile]) -> Iterator[Record]:
    return (record for file in files for record in records_of(file))
