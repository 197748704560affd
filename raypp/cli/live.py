"""Shows a run live: a progress line while it trains, its events above it, a summary at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner

from raypp.api.find_run import present_status
from raypp.cli.console import Console, Table, Text
from raypp.cli.render import curve, error_facts, facts, show_event, state_text
from raypp.clusters.known_runs import RunPlace
from raypp.errors import RayppError
from raypp.observe.reader import RunReader
from raypp.observe.status import date_and_clock, duration, is_final, loss_text, quantity
from raypp.records import Event
from raypp.storage import StoreError
from raypp.untrusted.text import shell_word

POLL_S = 0.5
STORE_PATIENCE_S = 60.0
_ETA_STEPS = 20
_PLAIN_LINES = 20
"""Approximate number of progress lines of a whole run if the output is not a terminal."""

EventKey = tuple[float, str, str, "int | None"]


class LiveView:
    """Shows one run while it is active.

    On a terminal, one line is updated in place and events scroll above it. Elsewhere it prints
    about twenty plain lines for the whole run. Call `skip_earlier_records` before the submission of
    a run that is resumed.

    Args:
        console: Where to write; standard output by default.
        poll_s: Seconds between polls of the run's records.
    """

    def __init__(self, console: Console | None = None, *, poll_s: float = POLL_S) -> None:
        self.console = console or Console()
        self._poll_s = poll_s
        self._status: Mapping[str, Any] | None = None
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._shown_events: set[EventKey] = set()
        self._shown_state: str | None = None
        self._shown_step = 0
        self._trouble_shown = False
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def skip_earlier_records(self, reader: RunReader) -> None:
        """Ignores the records now in the store, which are of an earlier submission of the run."""
        self._shown_events = {_key(event) for event in reader.events()}
        rows = reader.history()
        self._shown_step = rows[-1]["step"] if rows else 0

    def follow(
        self, place: RunPlace, reader: RunReader, stop_condition: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Shows the run until it ends, or until `stop_condition` returns True.

        Args:
            stop_condition: Called once per poll. After it returns True, the records are read once
                more.

        Returns:
            The last status. Its state is final unless `stop_condition` ended the loop.

        Raises:
            StoreError: The store did not respond for a minute.
            KeyboardInterrupt: Ctrl-C. The run itself continues.
        """
        self._started = time.monotonic()
        if not self.console.is_terminal:
            return self._watch(place, reader, stop_condition)
        with Live(
            get_renderable=self._moving_line, console=self.console, transient=True, refresh_per_second=8
        ) as self._live:
            try:
                return self._watch(place, reader, stop_condition)
            finally:
                self._live = None

    def _watch(self, place: RunPlace, reader: RunReader, stop_condition: Callable[[], bool] | None) -> dict[str, Any]:
        heard = time.monotonic()
        while True:
            last_look = stop_condition is not None and stop_condition()
            try:
                status = self._look(place, reader)
                heard = time.monotonic()
                self._trouble_shown = False
                if is_final(status) or last_look:
                    return status
            except StoreError as error:
                if time.monotonic() - heard > STORE_PATIENCE_S or last_look:
                    raise
                self._show_trouble(error)
            time.sleep(self._poll_s)

    def _look(self, place: RunPlace, reader: RunReader) -> dict[str, Any]:
        """Polls the records.

        Reads the status first, so that the other two contain everything it refers to.
        """
        status = present_status(place, reader)
        self.update(status, reader.history(), reader.events())
        return status

    def update(self, status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> None:
        """Takes the run's current records and shows what is new."""
        self._status, self._rows = status, rows
        if not self.console.is_terminal:
            self._plain_progress()
        for event in events:
            if _key(event) not in self._shown_events:
                self._shown_events.add(_key(event))
                show_event(self.console, event)
        if status["state"] != self._shown_state:
            # The first and the last state need no line: the following output shows them.
            if not is_final(status) and (self._shown_state is not None or status["state"] != "PENDING"):
                self._print(Text.assemble((time.strftime("%H:%M:%S"), "dim"), "  ", state_text(status["state"])))
            self._shown_state = status["state"]

    def _print(self, text: Text) -> None:
        # Without a terminal, a line is never wrapped, so that grep finds it.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def _plain_progress(self) -> None:
        step, steps = self._step(), self._status["steps"] if self._status else 0
        every = max(1, steps // _PLAIN_LINES)
        if step < self._shown_step:
            self._shown_step = step  # a restart went back to an earlier step
        elif step and (step >= self._shown_step + every or (step == steps and step != self._shown_step)):
            self._shown_step = step
            self._print(Text("  ".join(self._figures())))

    def _step(self) -> int:
        """Returns the last finished step.

        The history is read after the status, so it is never behind it.
        """
        if self._rows:
            return int(self._rows[-1]["step"])
        return int(self._status["step"]) if self._status else 0

    def _figures(self) -> list[str]:
        step, steps = self._step(), self._status["steps"] if self._status else 0
        row = self._rows[-1] if self._rows else {"loss": None, "tokens_per_s": None}
        figures = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"loss {loss_text(row['loss'])}",
            f"{quantity(row['tokens_per_s'])} tokens/s",
        ]
        if self._status is not None and (left := seconds_left(self._status, self._rows)) is not None:
            figures.append(f"ETA {duration(left)}")
        return figures

    def _moving_line(self) -> RenderableType:
        status = self._status
        grid = Table.grid(padding=(0, 2), expand=True)
        if status is None or status["state"] != "RUNNING" or not self._rows:
            grid.add_column(width=1)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            grid.add_row(self._spinner, self._waiting_text())
            return grid
        figures = self._figures()
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, status["steps"]), completed=self._step())
        grid.add_row(figures[0], bar, "  ".join(figures[1:]))
        return grid

    def _waiting_text(self) -> Text:
        """Describes a run that has no steps yet: its state, its ranks' states, the elapsed time."""
        elapsed = duration(time.monotonic() - self._started)
        if self._status is None:
            return Text(f"waiting for the run to start  {elapsed}")
        parts = [state_text(self._status["state"])]
        if self._step():
            parts.append(Text(f"step {self._step()}/{self._status['steps']}"))
        counts: dict[str, int] = {}
        for rank in self._status["ranks"]:
            counts[rank["state"]] = counts.get(rank["state"], 0) + 1
        if counts:
            parts.append(Text("ranks: " + ", ".join(f"{count} {state}" for state, count in counts.items())))
        return Text.assemble(*(piece for part in parts for piece in (part, "  ")), (elapsed, "dim"))

    def _show_trouble(self, error: RayppError) -> None:
        if not self._trouble_shown:
            self._trouble_shown = True
            self._print(Text(f"cannot read the run's records at the moment: {error.problems[0].what}", style="yellow"))

    def summary(
        self, place: RunPlace, status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], events: Sequence[Event]
    ) -> None:
        """Prints how the run ended: its figures, its loss curve, and useful next commands."""
        self.console.print(summary_view(place, status, rows, events, self.console))


def seconds_left(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the time that the remaining steps take, from the last ones; None if unknown."""
    if not rows or not status["steps"]:
        return None
    per_step = statistics.median(float(row["step_s"]) for row in rows[-_ETA_STEPS:])
    return per_step * max(0, int(status["steps"]) - int(rows[-1]["step"]))


def summary_view(
    place: RunPlace,
    status: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    console: Console,
) -> RenderableType:
    """Shows the end of a run, or its current state: figures, loss curve, next commands."""
    first, last = (rows[0], rows[-1]) if rows else (None, None)
    step = last["step"] if last else status["step"]
    loss = f"{loss_text(last['loss'])}  (step {first['step']}: {loss_text(first['loss'])})" if first and last else "–"
    pairs: list[tuple[str, RenderableType]] = [
        ("steps", f"{step} of {status['steps']}"),
        ("final loss", loss),
        *_held_out(events),
        ("tokens/s", quantity(statistics.median(row["tokens_per_s"] for row in rows) if rows else None) + "  (median)"),
        ("wall time", _wall_time(status, events)),
        ("restarts", str(status["restarts"])),
        ("checkpoint", status["checkpoint"] or "none"),
        *error_facts(status),
    ]
    parts: list[RenderableType] = [
        Text.assemble(("run ", ""), (status["run"], "bold"), "  ", state_text(status["state"])),
        facts(pairs),
    ]
    if (picture := curve(rows, console)) is not None:
        parts += [Text(""), Text("  loss", style="dim"), picture]
    commands = [(Text(command, style="bold"), words) for command, words in next_commands(place, status)]
    grid = Table.grid(padding=(0, 2))
    for command, words in commands:
        grid.add_row(Text.assemble("  ", command), Text(words, style="dim"))
    return Group(*parts, Text(""), Text("next", style="dim"), grid)


def _held_out(events: Sequence[Event]) -> list[tuple[str, RenderableType]]:
    """Returns the last evaluation, if there was one."""
    found = [event for event in events if event.kind == "evaluated"]
    if not found:
        return []
    return [("held-out loss", f"{loss_text(found[-1].number('loss'))}  (step {found[-1].step})")]


def next_commands(place: RunPlace, status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns commands that are useful now, each with its purpose."""
    name = shell_word(place.name)
    resume = f"raypp submit JOB --resume --set name={name}"  # the job file may contain another name
    commands = []
    if not is_final(status):
        commands += [
            (f"raypp status {name} --watch", "follow its progress"),
            (f"raypp stop {name}", "save, then stop it"),
        ]
    if status["state"] == "FAILED":
        commands += [(f"raypp events {name}", "what happened"), (f"raypp logs {name}", "the output of the ranks")]
    else:
        commands += [(f"raypp history {name}", "every step, as JSON lines"), (f"raypp events {name}", "what happened")]
    if is_final(status):
        commands.append((f"raypp report {name}", "one page: curves, events, checkpoints"))
    if status["checkpoint"]:
        if status["state"] in ("SUCCEEDED", "STOPPED"):
            commands.append((f"raypp generate {name} --prompt …", "what the model writes"))
        commands.append((f"raypp checkpoints verify {name}", "read and check every byte"))
        if status["state"] in ("FAILED", "STOPPED"):
            commands.append((resume, "resume from the checkpoint"))
        elif status["state"] == "SUCCEEDED":
            commands.append((f"{resume} --set train.steps=…", "train longer"))
    return commands


def _wall_time(status: Mapping[str, Any], events: Sequence[Event]) -> str:
    """Returns the time from the last submission to the last event."""
    starts = [event.time for event in events if event.kind == "submitted"] or [event.time for event in events[:1]]
    if not starts:
        return "–"
    end = events[-1].time if is_final(status) else time.time()
    return f"{duration(end - starts[-1])}  (from {date_and_clock(starts[-1])})"


def _key(event: Event) -> EventKey:
    return (event.time, event.kind, event.message, event.rank)
