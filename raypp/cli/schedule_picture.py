"""A schedule as a small chart: one line per pipeline rank, time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
FILLS = {"F": "", "B": "━", "I": "╌", "W": "═"}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
IDLE = "·"


@dataclass(frozen=True)
class Span:
    """One computation in time: `start` and `end` in units of the shortest one."""

    kind: str
    microbatch: int
    start: float
    end: float


def schedule_picture(ranks: Mapping[int, Sequence[Span]], width: int) -> Text:
    """Draws what each rank does when.

    A forward is its microbatch's number, a backward its number and a bar, idle time dots. A chart wider than `width`
    columns is cut at a column, with `…`.
    """
    spans = [span for row in ranks.values() for span in row]
    end = max((span.end for span in spans), default=0.0)
    label = max((len(f"pp{rank}") for rank in ranks), default=0) + 2
    room = max(width - label - 1, 8)
    digits = len(str(max((span.microbatch for span in spans), default=0)))
    # Columns per unit of time: room for a number and a blank, and one more where the whole chart still fits.
    scale = digits + 2 if end * (digits + 2) <= room else digits + 1
    text = Text(no_wrap=True)
    for rank, row in ranks.items():
        if text:
            text.append("\n")
        text.append(f"{f'pp{rank}':<{label}}", style="bold")
        line = _line(row, round(end * scale), scale)
        text.append_text(line if len(line) <= room else Text.assemble(line[: room - 1], "…"))
    kinds = [kind for kind in FILLS if any(span.kind == kind for span in spans)]
    text.append("\n" + " " * label)
    for kind in kinds:
        text.append(f"0{FILLS[kind] * 2}", style=STYLES[kind])
        text.append(f" {NAMES[kind]}   ", style="dim")
    text.append(f"{IDLE} idle", style="dim")
    if end * scale > room:
        text.append("   … goes on", style="dim")
    return text


def _line(row: Sequence[Span], columns: int, scale: int) -> Text:
    line = Text()
    for span in row:
        start, end = round(span.start * scale), round(span.end * scale)
        line.append(_idle(len(line), start, scale), style="dim")
        number = str(span.microbatch)
        cell = number if span.kind == "F" else number.ljust(max(end - start - 1, len(number)), FILLS[span.kind])
        line.append(cell.ljust(end - start)[: max(end - start, 1)], style=STYLES[span.kind])
    line.append(_idle(len(line), columns, scale), style="dim")
    return line


def _idle(start: int, end: int, scale: int) -> str:
    """A dot for each unit of time, in the columns where numbers would begin."""
    return "".join(IDLE if column % scale == 0 else " " for column in range(start, end))
