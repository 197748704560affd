"""Shows text from others so that it can neither control a terminal nor pass for other text."""

import logging
import re
import shlex

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, without tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these reverse the direction of text
    "\u2028\u2029\ud800-\udfff"  # line breaks; surrogates, which cannot be encoded
    # Nobody sees these. Joiners and variation selectors stay: scripts and emoji need them.
    "\u00ad\u034f\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff"
    "\U000e0000-\U000e007f]"
)
_ALSO_IN_A_LINE = re.compile(_UNSAFE.pattern[:-1] + "\t\n]")


def visible(text: object) -> str:
    r"""Returns text of one line: what is invisible or controls a terminal is written as `\x1b`."""
    return _ALSO_IN_A_LINE.sub(_escaped, str(text))


def visible_lines(text: object) -> str:
    """Like `visible`, but tabs and line feeds stay."""
    return _UNSAFE.sub(_escaped, str(text))


def shell_word(text: object) -> str:
    """Returns text as one word of a shell command that the user may paste."""
    return visible(shlex.quote(str(text)))


class VisibleFormatter(logging.Formatter):
    """Formats log records for a terminal. Further lines of a record are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(record)).replace("\n", "\n    ")


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
    return short.get(code) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
