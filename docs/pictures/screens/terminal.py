"""Runs a command on a terminal of its own and makes HTML of what that terminal shows."""

from __future__ import annotations

import fcntl
import html
import itertools
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.color import Color
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

_CONTROL = re.compile(r"\x1b\[(\??\d*)([A-Za-ln-z])|\r|\n|(?:\x1b\[[\d;]*m|[^\x1b\r\n])+")
_BRAILLE = re.compile(r"[\u2800-\u28ff]")
_STYLE = """
body { margin: 0; background: transparent; }
#screen { display: inline-block; background: #1a1c20; color: #d9dde2; padding: 0 18px 14px; }
#screen h1 { font: 12px "DejaVu Sans", sans-serif; color: #8b939e; margin: 0 -18px 12px; padding: 8px 18px;
  background: #25282e; }
pre { margin: 0; font: 14px/1.32 "DejaVu Sans Mono", monospace; }
/* The monospaced font has no braille; that of another font is wider. */
i { display: inline-block; width: .602em; font: 14px/1 "DejaVu Sans"; transform: scaleX(.822); transform-origin: left; }
"""


class Terminal:
    """A running command and what it has written.

    Args:
        columns: Width in characters.
        rows: Height in characters.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        columns: int = 110,
        rows: int = 60,
    ) -> None:
        self.written = b""
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        terminal = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env={**environment, **terminal}
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, patience_s: float = 600) -> list[str]:
        """Waits for the command to end; returns the lines of its terminal."""
        code = self.process.wait(patience_s)
        self._reader.join(10)
        assert code == 0, self.written.decode(errors="replace")
        return screen(self.written)

    def _read(self) -> None:
        try:
            while data := os.read(self._own, 1 << 16):
                self.written += data
        except OSError:  # the other end is closed
            pass


def screen(written: bytes) -> list[str]:
    """Returns the lines that a terminal shows after this output, with their colours' codes.

    It knows what Rich's live views use: rewriting of whole lines and of the whole screen.
    """
    lines, row = [""], 0
    for found in _CONTROL.finditer(written.decode(errors="replace")):
        number, code = found[1], found[2]
        if found[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code == "H":
            lines, row = [""], 0
        elif code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K":
            lines[row] = ""
        elif not code and found[0] != "\r":
            lines[row] += found[0]
    return "\n".join(lines).rstrip().split("\n")


def as_html(title: str, lines: Sequence[str]) -> str:
    """Makes a page whose element `#screen` is a terminal with these lines."""
    rows = "\n".join(_row(Text.from_ansi(line)) for line in lines)
    head = f'<meta charset="utf-8"><style>{_STYLE}</style>'
    return f'{head}<div id="screen"><h1>{html.escape(title)}</h1><pre>{rows}</pre></div>'


def _row(text: Text) -> str:
    parts = []
    for start, end in _pieces(text):
        here = (span.style for span in text.spans if span.start <= start < span.end)
        style = Style.combine([Style.null(), *(style for style in here if isinstance(style, Style))])
        content = _BRAILLE.sub(r"<i>\g<0></i>", html.escape(text.plain[start:end]))
        parts.append(f'<span style="{_css(style)}">{content}</span>')
    return "".join(parts)


def _pieces(text: Text) -> list[tuple[int, int]]:
    edges = sorted({0, len(text.plain), *(edge for span in text.spans for edge in (span.start, span.end))})
    return list(itertools.pairwise(edges))


def _css(style: Style) -> str:
    rules = [f"color:{_hex(style.color)}"] if style.color and not style.color.is_default else []
    if style.bgcolor and not style.bgcolor.is_default:
        rules.append(f"background:{_hex(style.bgcolor)}")
    rules += ["font-weight:bold"] * bool(style.bold) + ["opacity:.6"] * bool(style.dim)
    return ";".join(rules)


def _hex(color: Color) -> str:
    return color.get_truecolor(MONOKAI).hex
