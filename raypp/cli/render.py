"""Shows runs on a terminal: summaries, tables, lists."""

import itertools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding

from raypp.cli.console import Console, Lines, Table, Text
from raypp.control.clusters.known_runs import RunPlace
from raypp.records import Event
from raypp.state.run_records.status import (
    LOST,
    clock,
    date_and_clock,
    duration,
    loss_text,
    memory_text,
    mesh_text,
    quantity,
    rank_label,
    speed_text,
)

_STATE_STYLES = {
    "PENDING": "yellow",
    "RUNNING": "green",
    "RECOVERING": "yellow",
    "STOPPING": "yellow",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "STOPPED": "bold yellow",
}
_EVENT_STYLES = {
    "rank_failed": "red",
    "save_failed": "red",
    "failed": "bold red",
    "restarting": "yellow",
    "stop_requested": "yellow",
    "stopped": "bold yellow",
    "tracker_stopped": "yellow",
    "on_end_failed": "yellow",
    "tracker_dropped": "yellow",
    "committed": "green",
    "succeeded": "bold green",
}
_NARROWEST_PLACE = 16
"""Columns for the URL of a store; with less room it is left out."""
_MOST_POINTS = 20_000
_FIX = re.compile(r"\s*\n\s*fix: ")


def state_text(state: str | None) -> Text:
    return Text(state or "?", style=_STATE_STYLES.get(state or "", ""))


def facts(pairs: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Lays out names and values in two columns, indented."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, Text(value) if isinstance(value, str) else value)
    return Padding(grid, (0, 0, 0, 2), expand=False)


def curve(
    rows: Sequence[Mapping[str, Any]], console: Console, width: int = 60, height: int = 8
) -> RenderableType | None:
    """Draws the loss of a run's history; None if there is nothing to draw yet. Of very many steps,
    only every n-th is read: the live screen draws it twice a second."""
    lines = loss_curve(
        [(row["step"], row["loss"]) for row in (*rows[:: 1 + len(rows) // _MOST_POINTS], *rows[-1:])],
        width=min(width, console.width - 4),
        height=height,
        ascii_only="utf" not in console.encoding.lower(),
    )
    return Padding(Lines("\n".join(lines), no_wrap=True), (0, 0, 0, 2), expand=False) if lines else None


def used_text(row: Mapping[str, Any]) -> str:
    """Formats what a step's history says about the parts of a mixture; empty if there are none."""
    names = [key[5:-7] for key in row if key.startswith("data.") and key.endswith(".tokens")]
    return "; ".join(
        f"{name}: {quantity(row[f'data.{name}.tokens'])} tokens, {row.get(f'data.{name}.epochs', 0):.2f} epochs"
        for name in names
    )


def status_view(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], console: Console) -> RenderableType:
    """Shows the state of a run: progress, speed, mesh, error, ranks and loss curve."""
    step, steps = status["step"], status["steps"]
    share = f"  ({100 * step // steps} %)" if steps else ""
    head = Text.assemble((status["run"], "bold"), "  ", state_text(status["state"]))
    pairs: list[tuple[str, RenderableType]] = [
        ("step", f"{step} of {steps}{share}" if steps else f"{step}"),
        ("loss", loss_text(status["loss"])),
        ("tokens/s", speed_text(status)),
        ("attempt", f"{status['attempt']}  (restarts: {status['restarts']})"),
        ("checkpoint", status["checkpoint"] or "none yet"),
    ]
    if rows and (used := used_text(rows[-1])):
        pairs.append(("data", used))
    if short := memory_text(status):
        pairs.append(("memory", short))
    if status["mesh"]:
        pairs.append(("mesh", mesh_text(status["mesh"])))
    if status.get("updated_at"):
        age = time.time() - status["updated_at"]
        pairs.append(("as of", f"{date_and_clock(status['updated_at'])}  ({duration(age)} ago)"))
    pairs += error_facts(status)
    parts: list[RenderableType] = [head, facts(pairs)]
    if status["ranks"]:
        parts += [Text(""), Padding(ranks_table(status), (0, 0, 0, 2), expand=False)]
    if (picture := curve(rows, console)) is not None:
        parts += [Text(""), Text("  loss", style="dim"), picture]
    return Group(*parts)


def error_facts(status: Mapping[str, Any]) -> list[tuple[str, RenderableType]]:
    """Returns why the run ended, or what it recovered from; nothing if nothing failed."""
    if not status["error"]:
        return []
    name, style = ("last failure", "yellow") if survived(status) else ("error", "red")
    name = "note" if status["state"] == "PENDING" else name  # that it waits
    return [(name, Lines(status["error"], style=style))]


def survived(status: Mapping[str, Any]) -> bool:
    """Returns whether the error of a status, if it has one, did not end the run."""
    return status["state"] not in ("FAILED", None)


def ranks_table(status: Mapping[str, Any]) -> Table:
    """Shows one line per rank: its place in the mesh, its node, its process and its state."""
    table = Table("rank", "place", "node", "pid", "state", right=("rank",), folded=("node",))
    for rank in status["ranks"]:
        bad = rank["state"] in LOST
        table.add_row(
            str(rank["rank"]),
            rank_label(rank["coordinates"], status["mesh"]),
            str(rank["node"]),
            str(rank["pid"] or "–"),
            Text(str(rank["state"]), style="red" if bad else ""),
        )
    return table


def runs_table(runs: Sequence[tuple[Mapping[str, Any], RunPlace]], width: int | None) -> RenderableType:
    """Shows one line per run. Lists errors below the table. Names are never truncated, because they
    often differ in their last characters: where they leave too little room, the last of the other
    columns are left out. `runs`: the status of each, as in `status --json`, and its place. `width`:
    columns of the terminal; None without one: all columns, and the errors in the last."""
    statuses, places = [status for status, _ in runs], [place.url for _, place in runs]
    columns: dict[str, list[str | Text]] = {
        "run": [Text(status["run"], style="bold") for status in statuses],
        "state": [state_text(status["state"]) for status in statuses],
        "step": [f"{status['step']}/{status['steps']}".removesuffix("/0") for status in statuses],
        "loss": [loss_text(status["loss"]) for status in statuses],
        "tokens/s": [quantity(status["tokens_per_s"]) for status in statuses],
        "restarts": [str(status["restarts"]) for status in statuses],
        "age": ["–" if not one.submitted_at else duration(time.time() - one.submitted_at) for _, one in runs],
        "cluster": [(place.address or "–").removeprefix("http://") for _, place in runs],
    }
    if any(status.get("waited_s") for status in statuses):
        columns["waited"] = ["–" if not (one := status.get("waited_s")) else duration(one) for status in statuses]
    taken = {name: 2 + max(map(len, (name, *cells))) for name, cells in columns.items()}
    for name in ("restarts", "cluster", "waited", "age", "tokens/s", "loss"):
        if width is not None and name in columns and sum(taken.values()) > width:
            del columns[name], taken[name]
    one_place = width is not None and len(set(places)) == 1
    if width is None or (not one_place and width - sum(taken.values()) >= _NARROWEST_PLACE):
        columns["where"] = list(places)
    if width is None:
        columns["error"] = [one_line(status["error"] or "") for status in statuses]
    texts = {"run", "state", "cluster", "where", "error"}
    table = Table(*columns, right=columns.keys() - texts, folded=("run", "where"))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    if width is None:
        return table
    below = [Text(f"in {places[0]}", style="dim")] if one_place else []
    errors = [
        Text.assemble(
            (f"{status['run']}: ", "bold"),
            (status["error"].partition("\n")[0], "yellow" if survived(status) else "red"),
        )
        for status in statuses
        if status["error"]
    ]
    return Group(table, *below, *([Text(""), *errors] if errors else []))


def show_event(console: Console, event: Event, *, date: bool = False) -> None:
    """Prints an event: time, kind, message and cause, place. Without a terminal it is one line."""
    when = date_and_clock(event.time) if date else clock(event.time)
    kind = Text(f"{event.kind:<15}", style=event_style(event))
    if console.is_terminal:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(when, style="dim"), kind, Lines.assemble(*event_words(event)))
        console.print(grid)
    else:
        message, place = event_words(event)
        console.print(Text.assemble(when, "  ", kind, "  ", one_line(message), place), soft_wrap=True)


def event_style(event: Event) -> str:
    """Returns the colour of an event's kind."""
    return _EVENT_STYLES.get(event.kind, "cyan")


def event_words(event: Event) -> tuple[str, tuple[str, str]]:
    """Returns the message with its cause, and the place with its style."""
    place = [f"step {event.step}"] if event.step is not None else []
    place += [f"rank {event.rank}"] if event.rank is not None else []
    place += [f"on {event.node}"] if event.node else []
    words = event.message
    cause = str(event.details.get("cause") or "")
    if cause and cause not in words:
        words = f"{words}: {cause}" if words else cause
    return words, (f"  ({', '.join(place)})" if place else "", "dim")


def one_line(text: str) -> str:
    """Joins the lines of a text, for output with a promised line. A fix follows a semicolon."""
    return re.sub(r"\s*\n\s*", " ", _FIX.sub("; fix: ", text))


_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row (4) and column (2)."""


def loss_curve(
    points: Sequence[tuple[int, float]], *, width: int = 60, height: int = 8, ascii_only: bool = False
) -> list[str]:
    """Draws values over steps. `points`: (step, value), in ascending order of steps. Values that
    are not finite are skipped. `width`: total width in columns, including labels. `height`: total
    height in rows, including the axis and its labels (two rows). `ascii_only`: for terminals that
    cannot show braille. Returns at most `height` lines of at most `width` columns; empty for fewer
    than two values."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return []
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = _value_labels(low, high)
    margin = max(len(label) for label in labels)
    columns, rows = width - margin - 2, height - 2
    if high == low:
        low, high = low - 0.5, high + 0.5
    lit = _trace(_column_means(points, 2 * columns), low, high, 4 * rows)
    lines = []
    for row in range(rows):
        cells = "".join(_cell(lit, row, column, ascii_only) for column in range(columns)).rstrip()
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        edge = ("+" if label else "|") if ascii_only else ("┤" if label else "│")
        lines.append(f"{label:>{margin}} {edge}{cells}")
    corner, line = ("+", "-") if ascii_only else ("└", "─")
    lines.append(f"{'':>{margin}} {corner}{line * columns}")
    lines.append(f"{'':>{margin}}  {_step_labels(points[0][0], points[-1][0], columns)}")
    return lines


def _value_labels(low: float, high: float) -> tuple[str, str]:
    """Returns the top and the bottom label, with up to six digits so that they differ."""
    for digits in range(3, 7):
        labels = f"{high:.{digits}g}", f"{low:.{digits}g}"
        if labels[0] != labels[1]:
            return labels
    return f"{high:.3g}", f"{low:.3g}"


def _step_labels(first: int, last: int, columns: int) -> str:
    """Returns the line below the axis: first and last step, or only the last if space is short."""
    start = f"step {first}"
    room = columns - len(start)
    return f"{start}{last:>{room}}" if room > len(str(last)) else f"{last:>{columns}}"[-columns:]


def _column_means(points: Sequence[tuple[int, float]], columns: int) -> list[tuple[int, float]]:
    """Returns the mean value of each dot column that contains a step."""
    first, last = points[0][0], points[-1][0]
    sums: dict[int, tuple[float, int]] = {}
    for step, value in points:
        column = round((step - first) / (last - first) * (columns - 1))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = total + value, count + 1
    return [(column, total / count) for column, (total, count) in sorted(sums.items())]


def _trace(means: Sequence[tuple[int, float]], low: float, high: float, rows: int) -> set[tuple[int, int]]:
    """Returns the dots (row from the top, column) of an unbroken line through the means."""

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (rows - 1))

    lit: set[tuple[int, int]] = set()
    before = row_of(means[0][1])
    for (left, start), (right, end) in itertools.pairwise(means):
        for column in range(left, right + 1):
            row = row_of(start + (end - start) * (column - left) / (right - left))
            # A steep section fills the column between its rows, except for the dot already set.
            reach = range(min(before + 1, row), row + 1) if row >= before else range(row, before)
            lit.update((between, column) for between in reach)
            before = row
    return lit


def _cell(lit: set[tuple[int, int]], row: int, column: int, ascii_only: bool) -> str:
    bits = sum(
        _DOTS[dot_row][dot_column]
        for dot_row in range(4)
        for dot_column in range(2)
        if (4 * row + dot_row, 2 * column + dot_column) in lit
    )
    if not bits:
        return " "
    return "*" if ascii_only else chr(_BRAILLE + bits)
