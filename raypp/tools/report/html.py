"""Makes HTML. Only `tag` makes markup; every other string is escaped."""

import html
from typing import Any

from raypp.untrusted.text import visible_lines

LONGEST_TEXT = 4000
"""Characters of one text; a longer one ends in `…`."""
_VOID = ("meta", "path", "line")


class Whole(str):
    """Text that is escaped, but never truncated: coordinates and data that raypp generates."""

    __slots__ = ()


class Html(str):
    """Markup: a string that `tag` and `joined` do not escape."""

    __slots__ = ()


def text(value: object, longest: int = LONGEST_TEXT) -> Html:
    """Returns text as markup: escaped, and without control characters."""
    shown = visible_lines(value)
    if len(shown) > longest and not isinstance(value, Whole):
        shown = shown[: longest - 1] + "…"
    return Html(html.escape(shown, quote=True))


def joined(*parts: object) -> Html:
    """Joins markup and text. Text is escaped; None is left out."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: Any) -> Html:
    """Returns an element. `children`: markup, or text. `attributes`: by name; `cls` is `class`, `_`
    in a name is `-`. None leaves one out."""
    written = "".join(
        f' {("class" if key == "cls" else key.strip("_").replace("_", "-"))}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}/>" if name != "meta" else f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")
