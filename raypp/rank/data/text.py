"""Plain text: a document is a paragraph; blank lines separate paragraphs."""

from collections.abc import Iterator

from raypp.kinds import SourceKind
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.source_files import MOST_TEXT_BYTES, SourceFile, find_files, too_long
from raypp.rank.data.tokenised import Request, Text, tokenise

KIND = SourceKind(
    "text", "text files; a blank line ends a document", position=1, endings=(".txt", ".text", ".md"), compressed=True
)


def read(request: Request) -> Corpus:
    """Reads all paragraphs of all files, in order of file name. Raises DataError: no file, no
    paragraph, one that is too long, or a line that is not UTF-8."""
    files = find_files(request.path, KIND.endings, request.place, compressed=True)
    return tokenise(request, files, lambda: (text for file in files for text in paragraphs(file)))


def paragraphs(file: SourceFile) -> Iterator[Text]:
    """Yields a file's paragraphs, their lines joined by `\\n`. A line of spaces counts as blank."""
    lines: list[str] = []
    first = size = 0
    for number, line in file.lines():
        if line.strip():
            if not lines:
                first, size = number, 0
            lines.append(line)
            size += len(line) + 1
            if size > MOST_TEXT_BYTES:
                raise too_long(file.place, f"{file.name}:{first}", "paragraph")
        elif lines:
            yield Text(f"{file.name}:{first}", "\n".join(lines))
            lines = []
    if lines:
        yield Text(f"{file.name}:{first}", "\n".join(lines))
