"""`raypp status | list | history | events | logs | report`: the records of a run."""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len, set_cell_size

from raypp.api.run_control import event_json, label_of
from raypp.cli.console import Console, Lines, Text
from raypp.cli.output import echo, echo_json, echo_lines, json_text, styled, write_file
from raypp.cli.render import one_line, runs_table, show_event, status_view
from raypp.control.clusters import known_runs
from raypp.control.clusters.find import lend_settings_of
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import POLL_S, find_run, follow, open_reader, present_status
from raypp.control.queue.ticket import waited_s
from raypp.environment import need
from raypp.errors import JobError, Problem, RayppError, size_text
from raypp.records import RunState
from raypp.state.run_records.append_log import Cursor
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import STATUS_KEYS, RunStatus, is_final, loss_text, quantity
from raypp.state.run_records.tracked import LOGDIR
from raypp.tools.report.collect import collect
from raypp.tools.report.page import page
from raypp.untrusted.text import visible

_RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
_WIDEST_TAG = 24
_UNWRAPPED = 1 << 16
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


@click.command("status")
@click.argument("run")
@click.option("--watch", "-w", is_flag=True, help="Keep updating until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --watch: one line per change).")
def status_command(run: str, watch: bool, as_json: bool) -> None:
    """Show the state of RUN: progress, speed, mesh, ranks and errors.

    RUN is a run's name, or URL/NAME. With --watch, a terminal shows a live screen; Ctrl-C
    leaves it.
    """
    place, reader = find_run(run)
    if watch:
        _watch_status(place, reader, as_json)
    elif as_json:
        echo_json(_status_json(present_status(place, reader)))
    else:
        console = Console()
        console.print(status_view(present_status(place, reader), reader.history(), console))
        _warn_of_damage(reader)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(list(RunState), case_sensitive=False), help="Only such runs."
)
@click.option("--mine", is_flag=True, help="Only runs that you submitted from this machine.")
def list_command(as_json: bool, states: tuple[str, ...], mine: bool) -> None:
    """List the runs that were submitted from here or that the cluster knows.

    Without a terminal, each run is one line with all columns.
    """
    places = known_runs.known_runs(mine=mine)
    lend_settings_of(*(place.address for place in places))
    with ThreadPoolExecutor(8) as pool:
        found = [(status, place) for status, place in zip(pool.map(_status_or_error, places), places, strict=True)]
    found = [(status, place) for status, place in found if not states or status["state"] in states]
    statuses = [status for status, _ in found]
    if as_json:
        keys = [key for key in (*STATUS_KEYS, "waited_s") if key != "ranks"]
        echo_json([{key: status[key] for key in keys} for status in statuses])
    elif not found:
        echo(f"no {'such ' if places else ''}runs found; start one with `raypp submit JOB`, or name one as URL/NAME")
    else:
        console = Console()
        width = console.width if console.is_terminal else None
        (console if width else Console(width=_UNWRAPPED)).print(runs_table(found, width))


@click.command("history")
@click.argument("run")
def history_command(run: str) -> None:
    """Print RUN's steps as JSON lines, oldest first, floats at full precision.

    A step that was repeated after a restart appears once, with the values of the last attempt.
    Values that are not finite appear as NaN, Infinity or -Infinity, as Python's json reads them.
    """
    _, reader = find_run(run)
    if rows := reader.history():
        echo_lines("\n".join(json_text(row) for row in rows))
    _warn_of_damage(reader)


@click.command("events")
@click.argument("run")
@click.option("--samples", is_flag=True, help="Print the samples of train.sample instead, in full.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list of objects.")
def events_command(run: str, samples: bool, as_json: bool) -> None:
    """Print the events of RUN, oldest first: time, kind, cause, step, rank, node."""
    place, reader = find_run(run)
    if samples:
        _show_samples(place, reader, as_json)
        return
    events = reader.events()
    if as_json:
        echo_json([event_json(event) for event in events])
    else:
        console = Console()
        for event in events:
            show_event(console, event, date=True)
    _warn_of_damage(reader)


@click.command("logs")
@click.argument("run")
@click.option("--rank", type=click.IntRange(0), default=None, help="Only this rank's lines.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the run ends.")
@click.option("--tail", "-n", type=click.IntRange(0), help="Only the last lines, and with --follow new ones.")
def logs_command(run: str, rank: int | None, follow: bool, tail: int | None) -> None:
    """Print the logs of all ranks of RUN as one stream.

    Each line is tagged with its rank's coordinates. Colours are left out; other control characters
    are shown as \\x1b. A carriage return, as in a progress bar, begins a new line.
    """
    place, reader = find_run(run)
    cursor = Cursor()
    # Read the status before the lines: if the run has ended by then, all its lines are there.
    status = present_status(place, reader)
    printer = _LogPrinter()
    lines = reader.logs(rank, cursor)
    printer.print(lines if tail is None else deque(lines, tail))
    while follow and not is_final(status):
        time.sleep(POLL_S)
        status = present_status(place, reader)
        printer.print(reader.logs(rank, cursor))
    if rank is not None and tail != 0 and not printer.printed and status["ranks"]:
        ranks = sorted(entry["rank"] for entry in status["ranks"])
        if rank not in ranks:
            raise JobError(Problem("--rank", f"{place.name} has no rank {rank}", f"use 0 to {ranks[-1]}"))
    _warn_of_damage(reader)


def _show_samples(place: RunPlace, reader: RunReader, as_json: bool) -> None:
    samples = reader.samples()
    if as_json:
        echo_json(samples)
    elif not samples:
        echo(f"{place.name} has no samples yet: train.sample of its job takes them", err=True)
    for taken in () if as_json else samples:
        echo(styled(f"step {taken['step']}", bold=True))
        for sample in taken["samples"]:
            echo_lines(styled(sample.get("prompt", ""), dim=True), sample.get("text", ""))
        echo()
    _warn_of_damage(reader)


class _LogPrinter:
    """Prints log lines as `pp0-fsdp1 | text`, with tags of equal width, one colour per rank."""

    def __init__(self) -> None:
        self.printed = False
        self._console = Console()
        self._widest = 0

    def print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.printed = True
            tag = visible(label_of(line))[: 10 * _WIDEST_TAG]
            tag = tag if cell_len(tag) <= _WIDEST_TAG else f"{set_cell_size(tag, _WIDEST_TAG - 1)}…"
            self._widest = max(self._widest, cell_len(tag))
            tag = f"{set_cell_size(tag, self._widest)} | "
            for text in _COLOUR.sub("", line.text).splitlines() or [""]:
                if self._console.is_terminal:
                    colour = "white" if line.rank is None else _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]
                    self._console.print(Text.assemble((tag, colour), Lines(text)), soft_wrap=True)
                else:
                    echo_lines(tag, text)


def _watch_status(place: RunPlace, reader: RunReader, as_json: bool) -> None:
    console = Console()
    if console.is_terminal and not as_json:
        from raypp.cli.screen_view import watch

        last = watch(place, reader, console)
        console.print(status_view(last.status, last.rows, console))
        return
    shown = ""
    for records in follow(place, reader):
        line = json_text(_status_json(records.status)) if as_json else _status_line(records.status)
        if line != shown:
            echo(line)
            shown = line


def _status_or_error(place: RunPlace) -> dict[str, Any]:
    """Returns a run's status; without a state if its store does not respond: the list goes on."""
    try:
        reader = open_reader(place)
        return present_status(place, reader) | {"waited_s": waited_s(reader.store, place.name)}
    except RayppError as error:
        unknown = RunStatus(place.name, RunState.PENDING, error=f"cannot read its records: {error.problems[0].fault}")
        return {**unknown.as_dict(), "state": None, "waited_s": None}


def _status_json(status: dict[str, Any]) -> dict[str, Any]:
    return {key: status[key] for key in STATUS_KEYS}


def _status_line(status: dict[str, Any]) -> str:
    figures = f"loss {loss_text(status['loss'])}  {quantity(status['tokens_per_s'])} tokens/s"
    error = f"  {one_line(status['error'])}" if status["error"] else ""
    return f"{status['state']}  step {status['step']}/{status['steps']}  {figures}  attempt {status['attempt']}{error}"


def _warn_of_damage(reader: RunReader) -> None:
    if reader.damaged:
        echo(f"skipped {reader.damaged} damaged lines of the run's records", err=True)


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
def report_command(runs: tuple[str, ...], out: Path) -> None:
    """Write one HTML page about RUN, or about two runs side by side.

    The page needs nothing else: it works offline, on a phone, and in an e-mail.
    """
    if len(runs) > 2:
        raise JobError(Problem("RUN", f"{len(runs)} runs are named; a page shows one or two", "name one or two"))
    collected = [collect(*find_run(run)) for run in runs]
    if len(collected) == 2 and collected[0].title == collected[1].title:
        collected = [replace(run, title=f"{run.title} ({run.url})") for run in collected]
    content = page(collected).encode("utf-8", "replace")
    write_file(out, content)
    echo(f"wrote {out} ({size_text(len(content))})")


@click.command("tensorboard")
@click.argument("run")
@click.argument("options", nargs=-1)
def tensorboard_command(run: str, options: tuple[str, ...]) -> None:
    """Open TensorBoard on what RUN's tracker `tensorboard` writes, with the settings of its store.

    OPTIONS after -- are TensorBoard's, such as --port.
    """
    need("tensorboard", "tensorboard", "raypp tensorboard")
    _, reader = find_run(run)
    told = [event.message.partition(LOGDIR) for event in reader.events() if event.kind == "tracking"]
    folders = [folder for _, found, folder in told if found]
    if not folders:
        fix = "`observe: {trackers: [tensorboard]}` in its job; `raypp report` draws its curves without"
        raise JobError(Problem("RUN", f"{reader.run} has written nothing for TensorBoard", fix))
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", "--logdir", folders[-1], *options])
