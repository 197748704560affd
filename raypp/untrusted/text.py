"""Shows text of others, so that it can neither control a terminal nor pose as other text."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, without tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these reverse the direction of text
    "\u2028\u2029\ufeff\ud800-\udfff\U000e0000-\U000e007f]"  # line breaks and marks that nobody sees
)
_ALSO_IN_A_LINE = re.compile(_UNSAFE.pattern[:-1] + "\t\n]")


def visible(text: object) -> str:
    r"""Returns text of one line: what is invisible or controls a terminal is written as `\x1b`."""
    return _ALSO_IN_A_LINE.sub(_escaped, str(text))


def visible_lines(text: object) -> str:
    """Like `visible`, but tabs and line feeds stay."""
    return _UNSAFE.sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    short = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
    return short.get(code) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
