"""The live screen of `raypp status --watch`: progress, mesh, loss curve, events."""

import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar

from raypp.cli.console import Console, Table, Text
from raypp.cli.render import curve, event_style, event_words, one_line, state_text
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import Records, follow
from raypp.records import Event
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import clock, duration, is_final, loss_text, mesh_text, quantity, row_label

_CELL = 13
_EVENTS = 6
_RANK_STYLES = {
    "running": "green",
    "step": "green",
    "saving": "cyan",
    "done": "bold green",
    "dead": "bold red",
    "failed": "bold red",
    "gone": "bold red",
}


def watch(place: RunPlace, reader: RunReader, console: Console) -> Records:
    """Shows the run until it ends. Returns the last records. Raises StoreError: the store did not
    respond for a minute. Raises KeyboardInterrupt: Ctrl-C. The run itself continues."""
    following = follow(place, reader)
    records = next(following)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as exceptions, after which the terminal is as before
        signal.signal(number, _leave)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while not is_final(records.status):
            live.update(screen_view(records, console), refresh=True)
            records = next(following)
    return records


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def screen_view(records: Records, console: Console) -> RenderableType:
    """Draws a whole screen, of the console's present size."""
    status, height = records.status, console.size.height
    mesh = mesh_view(status, console.size.width - 4, max(2, height // 3))
    mesh_rows = len(mesh) + 1
    event_rows = min(_EVENTS, max(1, len(records.events)), max(1, height // 4))
    curve_rows = height - 5 - mesh_rows - event_rows - 4
    parts = [
        Layout(_head(records), size=5),
        Layout(_titled("mesh", f"  {mesh_text(status['mesh'])}" if status["mesh"] else "", *mesh), size=mesh_rows),
    ]
    if curve_rows >= 4:
        picture = curve(records.rows, console, console.size.width - 4, curve_rows) or Text("  no steps yet", "dim")
        parts.append(Layout(_titled("loss", "", picture)))
    parts.append(Layout(_titled("events", "", *_events(records.events[-event_rows:])), size=event_rows + 2))
    footer, style = records.trouble or "Ctrl-C leaves; the run continues", "yellow" if records.trouble else "dim"
    parts.append(Layout(Text(footer, style, no_wrap=True, overflow="ellipsis"), size=1))
    screen = Layout()
    screen.split_column(*parts)
    return screen


def _titled(name: str, rest: str, *lines: RenderableType) -> RenderableType:
    return Group(Text.assemble((name, "bold"), (rest, "dim")), *lines)


def _head(records: Records) -> RenderableType:
    status, rows = records.status, records.rows
    step, steps, left = records.step, int(status["steps"]), records.seconds_left
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    remaining = f"ETA {duration(left)}" if left is not None else ""
    grid.add_row(
        f"step {step}/{steps}" if steps else f"step {step}", ProgressBar(total=max(1, steps), completed=step), remaining
    )
    row = rows[-1] if rows else {}
    evaluations = [event for event in records.events if event.kind == "evaluated"]
    figures = [
        f"loss {loss_text(row.get('loss', status['loss']))}",
        *(f"held-out loss {loss_text(one.number('loss'))}" for one in evaluations[-1:]),
        f"{quantity(row.get('tokens_per_s', status['tokens_per_s']))} tokens/s",
        *([f"{row['step_s']:.3g} s/step", f"grad norm {row['grad_norm']:.3g}"] if row else []),
        f"attempt {status['attempt']} (restarts: {status['restarts']})",
    ]
    age = time.time() - float(status["updated_at"])
    title = Text.assemble((status["run"], "bold"), "  ", state_text(status["state"]), (f"  {duration(age)} ago", "dim"))
    place = Text(f"checkpoint {status['checkpoint'] or 'none yet'}", style="dim", no_wrap=True, overflow="ellipsis")
    error = Text(one_line(status["error"] or ""), style="red", no_wrap=True, overflow="ellipsis")
    return Group(title, grid, Text("  ".join(figures), no_wrap=True, overflow="ellipsis"), place, error)


def mesh_view(status: Mapping[str, Any], width: int, height: int) -> list[RenderableType]:
    """Draws the ranks, a column per pipeline rank, or their number by state. Returns its lines."""
    ranks = status["ranks"]
    if not ranks:
        return [Text("  no ranks now", style="dim")]
    stages = sorted({rank["coordinates"]["pp"] for rank in ranks})
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank in ranks:
        place = rank["coordinates"]
        rows.setdefault(row_label(place, status["mesh"]), {})[place["pp"]] = rank
    margin = max(map(len, rows)) + 2
    if len(rows) + 1 > height or margin + _CELL * len(stages) > width:
        return _counts(ranks)
    lines: list[RenderableType] = [Text("  " + " " * margin + "".join(f"{f'pp{stage}':<{_CELL}}" for stage in stages))]
    for name, cells in rows.items():
        line = Text(f"  {name:<{margin}}")
        for stage in stages:
            rank = cells.get(stage)
            state = str(rank["state"]) if rank else ""
            words = f"{rank['rank']} {state}"[: _CELL - 1] if rank else ""
            line.append(f"{words:<{_CELL}}", _RANK_STYLES.get(state, "yellow"))
        lines.append(line)
    return lines


def _counts(ranks: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    counts = Counter(str(rank["state"]) for rank in ranks).most_common()
    usual = counts[0][0]
    lines: list[RenderableType] = [Text("  " + ", ".join(f"{count} {state}" for state, count in counts))]
    others = [f"{rank['rank']} {rank['state']} on {rank['node']}" for rank in ranks if rank["state"] != usual]
    if others:
        lines.append(Text("  " + "; ".join(others[:8]), style="yellow", no_wrap=True, overflow="ellipsis"))
    return lines


def _events(events: Sequence[Event]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for event in events:
        words, (place, style) = event_words(event)
        kind = (f"  {event.kind:<15}  ", event_style(event))
        line = Text.assemble(("  " + clock(event.time), "dim"), kind, one_line(words), (place, style))
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return lines or [Text("  none yet", style="dim")]
