"""Draws a schedule as a small chart: one line per pipeline rank, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypp.cli.console import Lines, Text
from raypp.schedules.picture import most_digits
from raypp.schedules.simulate import Slot

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
FILLS = {"F": "", "B": "━", "I": "╌", "W": "═"}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
IDLE = "·"


def schedule_picture(ranks: Mapping[int, Sequence[Slot]], width: int) -> Text:
    """Draws the actions of each pipeline rank over time.

    A forward is shown as its microbatch's number (`stage.number` if a rank has several stages), a
    backward as its number followed by a bar, idle time as dots. A chart wider than `width` columns
    is truncated with `…`.

    Args:
        ranks: Each rank's actions, with times in units of a forward.
        width: Available columns.
    """
    several = any(len({slot.action.stage for slot in row}) > 1 for row in ranks.values())
    end = max((row[-1].end for row in ranks.values() if row), default=0.0)
    head = max((len(f"pp{rank}") for rank in ranks), default=0) + 2
    room = max(width - head, 8)
    longest = most_digits(ranks, several) + several  # a dot between stage and number
    # Columns per unit of time: a label and a space, and one more if the whole chart still fits.
    scale = longest + 2 if end * (longest + 2) <= room else longest + 1
    text = Lines(no_wrap=True)
    for rank, row in ranks.items():
        # One more column shows that it is truncated.
        line = _line(row, several, min(round(end * scale), room + 1), scale)
        shown = line if len(line) <= room else Text.assemble(line[: room - 1], "…")
        text.append_text(Lines.assemble((f"{f'pp{rank}':<{head}}", "bold"), shown, "\n"))
    text.append(" " * head)
    kinds = {slot.action.kind for row in ranks.values() for slot in row}
    for kind in FILLS:
        if kind in kinds:
            text.append(f"0{FILLS[kind] * 2}", style=STYLES[kind])
            text.append(f" {NAMES[kind]}   ", style="dim")
    text.append(f"{IDLE} idle" + ("   … truncated" if end * scale > room else ""), style="dim")
    return text


def _label(slot: Slot, several: bool) -> str:
    action = slot.action
    return f"{action.stage}.{action.microbatch}" if several else str(action.microbatch)


def _line(row: Sequence[Slot], several: bool, columns: int, scale: int) -> Text:
    line = Text()
    for slot in row:
        start, end = round(slot.start * scale), round(slot.end * scale)
        if start >= columns:
            break
        label = _label(slot, several)
        line.append(_idle(len(line), start, scale), style="dim")
        fill = FILLS[slot.action.kind]
        cell = label.ljust(end - start - 1, fill) if fill else label
        line.append(cell.ljust(end - start), style=STYLES[slot.action.kind])
    line.append(_idle(len(line), columns, scale), style="dim")
    return line


def _idle(start: int, end: int, scale: int) -> str:
    """Draws a dot for each idle unit of time, in the columns where numbers would begin."""
    return "".join(IDLE if column % scale == 0 else " " for column in range(start, end))
