"""Prints tables and styled text by Rich. No text acts as markup or as control characters. Commands
use these classes, safe with any string, not Rich's. `output.py` is for plain lines."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import rich.console
import rich.table
import rich.text
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.style import Style

from raypp.untrusted.text import visible, visible_lines

LONGEST_CELL = 160
"""Characters of a table's cell; longer ones end in `…`."""


class Text(rich.text.Text):
    """A line of styled text. A line feed in a string is shown as `\\n`, an escape as `\\x1b`."""

    show: Callable[[object], str] = staticmethod(visible)

    def __init__(self, text: str = "", style: str | Style = "", **options: Any) -> None:
        super().__init__(self.show(text), style, **options)

    @classmethod
    def assemble(cls, *parts: Any, **options: Any) -> Self:
        """Joins strings, (string, style) pairs and texts."""
        return cast(Self, super().assemble(*parts, **options))

    def append(self, text: rich.text.Text | str, style: str | Style | None = None) -> rich.text.Text:
        """Adds text; a string as the constructor takes it."""
        return super().append(self.show(text) if isinstance(text, str) else text, style)

    def __add__(self, other: Any) -> rich.text.Text:
        return super().__add__(self.show(other) if isinstance(other, str) else other)


class Lines(Text):
    """Styled text of any length, with line feeds; for output where a false line does no harm."""

    show = staticmethod(visible_lines)


class Table(rich.table.Table):
    """A table whose cells are lines of limited length.

    Args:
        names: The heads of its columns.
        right: The columns that are aligned right.
        folded: The columns whose cells take several lines on a narrow terminal; None: all.
        rule: Whether a line is drawn below the heads.
        options: As Rich's.
    """

    def __init__(
        self,
        *names: str,
        right: Collection[str] = (),
        folded: Collection[str] | None = None,
        rule: bool = False,
        **options: Any,
    ) -> None:
        look: dict[str, Any] = {"show_edge": False, "pad_edge": False, "header_style": "dim"}
        look |= {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)} if rule else {"box": None, "padding": (0, 2, 0, 0)}
        super().__init__(**look | options)
        for name in names:
            justify = "right" if name in right else "left"
            self.add_column(name, justify=justify, overflow="fold", no_wrap=folded is not None and name not in folded)

    @classmethod
    def grid(cls, *headers: Any, **options: Any) -> rich.table.Table:
        """Returns a layout without borders, whose cells are not truncated."""
        return rich.table.Table.grid(*headers, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Adds a row. Cells that are strings, or text in one style, are truncated with `…`."""
        super().add_row(*(_cell(cell) for cell in cells), **options)

    def add_column(self, header: RenderableType = "", *rest: Any, **options: Any) -> None:
        """Adds a column; the header is truncated as a cell is."""
        super().add_column(_cell(header), *rest, **options)  # type: ignore[arg-type]


def _cell(cell: RenderableType | None) -> RenderableType | None:
    if isinstance(cell, Lines) or not isinstance(cell, str | rich.text.Text):
        return cell
    text = Text(cell) if isinstance(cell, str) else cell
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


class Console(rich.console.Console):
    """A console that takes strings literally: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """Converts a string to `Text`. Rich calls this for every string it prints or measures."""
        kept = {name: options[name] for name in ("style", "justify", "overflow") if name in options}
        return Text(text, **kept)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders anything. Shows control characters also in texts of other classes."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment  # Rich's own, such as a cursor move of a live view
            elif (shown := visible_lines(segment.text)) != segment.text:
                yield Segment(shown, segment.style)
            else:
                yield segment


def wide_console() -> Console:
    """Returns a console for the terminal; 120 columns wide without one."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


@contextmanager
def progress_bar(description: str, size: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows bytes, speed and time left on stderr, if it is a terminal. Yields a function that takes
    the bytes since its last call, or the `total` once that is known."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=size)
        yield lambda count=0, total=None: progress.update(task, advance=count, total=total)
