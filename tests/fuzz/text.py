"""Text of others on its way to a terminal."""

import io
import json
import shlex
import unicodedata
from contextlib import redirect_stderr, redirect_stdout

from raypp.cli.console import Console, Lines, Table, Text
from raypp.cli.output import echo, echo_json, echo_lines, show_error, styled
from raypp.errors import JobError, Problem
from raypp.untrusted.text import shell_word, visible, visible_lines
from tests.fuzz import target

_SAMPLES = ("layers.0 weight", "\x1b]0;title\x07\x9b2J\r", "[red]x[/red][/]", "a\nb\tc", "漢字\u202e\u200b\ud800")
_WORDS = ("\x1b[", "\x1b]8;;", "\x07", "\x9b", "[/", "[red]", "]", "\\", "\r\n", "\u2028", "$(", "'", "\u0301" * 50)


def _bytes(texts: tuple[str, ...]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts]


@target(*_bytes(_SAMPLES), words=_bytes(_WORDS))
def output(data: bytes) -> None:
    """No text makes a control character in a line, an error, JSON or a table."""
    text = data[:4096].decode("utf-8", "surrogateescape")
    _check(visible(text), "")
    _check(visible_lines(text), "\t\n")
    assert shlex.split(shell_word(text).replace("\n", " "))[1:] == []
    stream = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream):
        echo(text, styled(text, bold=True))
        assert stream.getvalue().count("\n") == 1
        echo_lines(text)
        show_error(JobError(Problem(text, text, text, text)))
    _check(stream.getvalue(), "\t\n")
    stream = io.StringIO()
    with redirect_stdout(stream):
        echo_json({text: text})
    _check(stream.getvalue().removesuffix("\n"), "")
    json.loads(stream.getvalue())
    _check(_drawn(text), "\t\n")


def _drawn(text: str) -> str:
    screen = Console(file=io.StringIO(), width=60)
    table = Table(title=text)
    table.add_column(text, overflow="fold")
    table.add_column("b", no_wrap=True)
    table.add_row(text, Text.assemble(text, (text, "red")))
    screen.print(text, Text(text), table)
    screen.print(Lines(text), soft_wrap=True)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def _check(shown: str, allowed: str) -> None:
    bad = {one for one in shown if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in allowed}
    assert not bad, f"printed {sorted(bad)!r}"
