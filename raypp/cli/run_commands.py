"""`raypp submit | save | stop | delete`: start a run, show it live, control it, and remove it."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner

import raypp
from raypp.api.checked_job import load_checked_job
from raypp.api.run_control import RunControl, end_in_words
from raypp.api.submission import JobWatch, Queued, enqueue, prepare, start
from raypp.cli.console import Console, Table, Text
from raypp.cli.options import job_argument
from raypp.cli.output import confirmed, echo, echo_json, json_text, say
from raypp.cli.render import curve, error_facts, facts, one_line, show_event, state_text
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import POLL_S, Records, follow
from raypp.control.queue.line import PRIORITIES, Priority
from raypp.control.queue.ticket import place_in_words
from raypp.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, size_text
from raypp.records import END_EVENTS, Event, RunState
from raypp.state.checkpoint.run_spec import read_end
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import date_and_clock, duration, is_final, loss_text, quantity
from raypp.storage import StoreError
from raypp.untrusted.text import shell_word

_JSON_KEYS = ("run", "state", "step", "loss", "tokens_per_s", "restarts", "checkpoint")
_PLACE_KEYS = {"job_id": "submission_id", "address": "address", "url": "url"}


@click.command("submit")
@job_argument
@click.option(
    "--address",
    metavar="A",
    help="URL of the cluster's dashboard, http://host:8265.  [default: RAYPP_ADDRESS, then the embedded cluster]",
)
@click.option("--detach", is_flag=True, help="Return once the cluster has accepted the run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--dry-run", is_flag=True, help="Check everything, including the store and the cluster. Start nothing.")
@click.option("--resume", is_flag=True, help="Resume the run of this name from its newest checkpoint.")
@click.option("--name", metavar="NAME", help="The run's name, in place of the job's.")
@click.option("--now", is_flag=True, help="Do not wait in line: end with exit code 4 if the devices are taken.")
@click.option("--priority", type=click.Choice(list(PRIORITIES)), default="normal", help="In the line.  [normal]")
@click.option("--after", multiple=True, metavar="RUN", help="Wait until RUN has succeeded. May be repeated.")
@click.option("--user", metavar="NAME", help="Whose run it is, for the record.  [default: your login]")
def submit_command(
    job: Path,
    overrides: tuple[str, ...],
    address: str | None,
    detach: bool,
    as_json: bool,
    dry_run: bool,
    resume: bool,
    name: str | None,
    now: bool,
    priority: Priority,
    after: tuple[str, ...],
    user: str | None,
) -> None:
    """Check JOB, submit it to the cluster, and follow the run to its end.

    While the devices are taken, the run waits in line. It waits or continues after Ctrl-C. The exit
    code is that of the run: 0 if it succeeded, 1 if it failed.
    """
    options = [("--set", one) for one in overrides] + [("--address", address), ("--name", name)]
    given = [word for option, value in options if value is not None for word in (option, value)]
    again = " ".join(map(shell_word, ["raypp", "submit", str(job), *given]))
    overrides += (f"name={json_text(name)}",) if name is not None else ()
    prepared = prepare(load_checked_job(job, overrides), address, resume, say, now=now, after=after)
    file, store, cluster = prepared.file, prepared.store, prepared.cluster
    if dry_run:
        echo(f"{file.job.name}: the job, the store and the cluster are fine; nothing was started", err=as_json)
        echo(f"  {_sides(prepared.versions)}", err=as_json)
        if prepared.waits:
            echo(f"  it would wait in line: {prepared.waits}", err=as_json)
        if as_json:
            _print_json({"run": file.job.name}, RunPlace(store.url, file.job.name, cluster.address))
        return
    view = LiveView()
    if resume:
        view.skip_earlier_records(RunReader(store, file.job.name))
    if prepared.waits:
        place = wait_in_line(enqueue(prepared, say, priority, user), prepared.waits, detach, as_json)
        if detach:
            if as_json:
                _print_json({"run": place.name, "state": str(RunState.PENDING)}, place)
            return
        raise SystemExit(_follow(place, RunReader(store, place.name), cluster, view, as_json, again))
    try:
        place = start(prepared, say, priority=priority, user=user)
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            echo(err=True)
            echo(note, err=True)
        raise
    echo(
        f"{place.name}: accepted by {cluster.address} as Ray job {place.submission_id}, "
        f"{file.job.mesh.world} ranks on {prepared.facts.device}",
        err=as_json,
    )
    echo(f"  {_sides(prepared.versions)}", err=as_json)
    if detach:
        _print_follow_commands(place, as_json)
        if as_json:
            _print_json({"run": place.name, "state": str(RunState.PENDING)}, place)
        return
    raise SystemExit(_follow(place, RunReader(store, place.name), cluster, view, as_json, again))


@click.command("save")
@click.argument("run")
def save_command(run: str) -> None:
    """Save a checkpoint of RUN now. Returns when it is committed."""
    active = RunControl.find(run)
    saved = active.save(_still_waiting(f"{run}: the checkpoint is not committed yet"))
    echo(f"{active.name}: step {saved['step']} is committed: {saved['what']}")


@click.command("stop")
@click.argument("run")
@click.option("--no-save", is_flag=True, help="Stop at once, without a final checkpoint.")
def stop_command(run: str, no_save: bool) -> None:
    """Stop RUN after a final checkpoint. Returns when the run has ended."""
    active = RunControl.find(run)
    already = "has ended already: " if is_final(active.status()) else ""
    end = active.stop(not no_save, _still_waiting(f"{run}: the run has not ended yet"))
    echo(f"{active.name}: {already}{end_in_words(end)}")


@click.command("delete")
@click.argument("run")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def delete_command(run: str, dry_run: bool, yes: bool) -> None:
    """Delete RUN: its checkpoints, records and logs, after it has ended."""
    found = RunControl.find(run)
    facts = found.delete(dry_run=True)
    what = f"{size_text(facts['bytes'])}: {len(facts['checkpoints'])} checkpoints, {facts['objects']} objects"
    what += f" below {found.place.url.rstrip('/')}/{found.name}"
    what += f" ({facts['left']} others there, which the run did not write, stay)" if facts["left"] else ""
    if dry_run or not yes:
        echo(f"{found.name}: would free {what}")
    if dry_run:
        return
    if yes or confirmed("Delete it?"):
        found.delete()
        echo(f"{found.name}: freed {what}")


def _still_waiting(state: str) -> Callable[[], None]:
    return lambda: echo(f"{state}; still waiting (Ctrl-C ends only the waiting)", err=True)


def _sides(versions: dict[str, str]) -> str:
    """Names the cluster's versions, and the version of raypp whose code travels with the job."""
    there = ", ".join(f"{name.capitalize()} {version}" for name, version in versions.items() if version)
    return f"the cluster has {there}; the code of raypp {raypp.__version__} travels with the job"


# submit: waiting in line, and following the run
# ----------------------------------------------------------------------------------------


def wait_in_line(queued: Queued, why: str, detach: bool, as_json: bool) -> RunPlace:
    """Shows a run's place until it starts; returns where it runs. Ctrl-C leaves it in the line."""
    name = shell_word(queued.place.name)
    echo(f"{queued.place.name}: {why}", err=as_json)
    try:
        for told in queued.follow(say, detach=detach):
            echo(f"{queued.place.name}: {place_in_words(told)}", err=as_json)
    except KeyboardInterrupt:
        echo(err=True)
        echo(f"{queued.place.name} stays in the line, and starts in its turn", err=True)
        _print_queue_commands(name, True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    if told["state"] in ("cancelled", "lost"):
        raise SystemExit(EXIT_RUN_FAILED)
    if detach:
        _print_queue_commands(name, as_json)
    return queued.place


def _print_queue_commands(name: str, err: bool) -> None:
    echo("  the line:   raypp queue", err=err)
    echo(f"  follow it:  raypp status {name} --watch", err=err)
    echo(f"  cancel it:  raypp queue cancel {name}", err=err)


def _follow(place: RunPlace, reader: RunReader, cluster: Cluster, view: LiveView, as_json: bool, again: str) -> int:
    if as_json:
        view.console.file = sys.stderr
    watch = JobWatch(cluster, place)
    try:
        try:
            view.follow(place, reader, watch.over)
            end = read_end(reader.store, place.name)
        except StoreError as error:
            echo(f"the run's job has ended, and its records cannot be read: {one_line(str(error))}", err=True)
            if as_json:
                _print_json({"run": place.name}, place)
            return watch.driver_exit_code
        code = watch.exit_code(end, say)
        records = Records.read(place, reader)
        view.console.print(summary_view(records, view.console))
        view.console.print(Text("next", style="dim"))
        for command, words in next_commands(place, records.status, again):  # each on a line, as a shell takes it
            pair = (f"{command:<36}", "bold"), (f"  # {words}", "dim")
            view.console.print(Text.assemble("  ", *pair), soft_wrap=True)
    except KeyboardInterrupt:
        echo(err=True)
        echo(f"{place.name} continues in the cluster", err=True)
        _print_follow_commands(place, True)
        return EXIT_INTERRUPTED
    if as_json:
        _print_json(records.status, place)
    return code


def _print_follow_commands(place: RunPlace, err: bool) -> None:
    name = shell_word(place.name)
    echo(f"  follow it:  raypp status {name} --watch", err=err)
    echo(f"  its output: raypp logs {name} --follow", err=err)
    echo(f"  stop it:    raypp stop {name}", err=err)


def _print_json(status: dict[str, Any], place: RunPlace) -> None:
    where = {key: getattr(place, name) or None for key, name in _PLACE_KEYS.items()}
    echo_json({key: status.get(key) for key in _JSON_KEYS} | where)


_PLAIN_LINES = 20
"""Approximate number of progress lines of a whole run if the output is not a terminal."""

EventKey = tuple[float, str, str, "int | None"]


class LiveView:
    """Shows one run while it is active. On a terminal, one line is updated in place and events
    scroll above it. Elsewhere it prints about twenty plain lines for the whole run. Call
    `skip_earlier_records` before the submission of a run that is resumed. `console`: where to
    write; standard output by default. `poll_s`: seconds between polls of the run's records."""

    def __init__(self, console: Console | None = None, *, poll_s: float = POLL_S) -> None:
        self.console = console or Console()
        self._poll_s = poll_s
        self._records: Records | None = None
        self._shown_events: set[EventKey] = set()
        self._shown_state: str | None = None
        self._shown_step = 0
        self._trouble_shown, self._ended = "", False
        self._started = time.monotonic()
        self._spinner = Spinner("dots")

    def skip_earlier_records(self, reader: RunReader) -> None:
        """Ignores the records now in the store, which are of an earlier submission of the run."""
        self._shown_events = {_key(event) for event in reader.events()}
        rows = reader.history()
        self._shown_step = rows[-1]["step"] if rows else 0

    def follow(self, place: RunPlace, reader: RunReader, over: Callable[[], bool] | None = None) -> Records:
        """Shows the run until it ends, or until `over` says so. Returns the last records. Their
        state is final unless `over` ended the loop. Raises StoreError: the store did not respond;
        see `api.find_run`. Raises KeyboardInterrupt: Ctrl-C. The run itself continues."""
        self._started = time.monotonic()
        moving = Live(get_renderable=self._moving_line, console=self.console, transient=True, refresh_per_second=8)
        with moving if self.console.is_terminal else nullcontext():
            for records in follow(place, reader, over, self._poll_s):
                self.update(records)
        return records

    def update(self, records: Records) -> None:
        """Takes the run's current records and shows what is new."""
        self._records, status = records, records.status
        trouble = re.sub(r"\d+", "#", records.trouble)  # figures may change each time
        if trouble and trouble != self._trouble_shown:
            self._print(Text(records.trouble, style="yellow"))
        self._trouble_shown = trouble
        if not self.console.is_terminal:
            self._plain_progress(records)
        for event in records.events:
            if _key(event) not in self._shown_events:
                self._shown_events.add(_key(event))
                show_event(self.console, event)
                self._ended |= event.kind in END_EVENTS.values()
        if status["state"] != self._shown_state:
            # The first and the last state need no line: the following output shows them. Nor does
            # one that was read before the event of the run's end.
            if not self._ended and not is_final(status) and (self._shown_state or status["state"] != "PENDING"):
                self._print(Text.assemble((time.strftime("%H:%M:%S"), "dim"), "  ", state_text(status["state"])))
            self._shown_state = status["state"]

    def _print(self, text: Text) -> None:
        # Without a terminal, a line is never wrapped, so that grep finds it.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def _plain_progress(self, records: Records) -> None:
        step, steps = records.step, records.status["steps"]
        every = max(1, steps // _PLAIN_LINES)
        if step < self._shown_step:
            self._shown_step = step  # a restart went back to an earlier step
        elif step and (step >= self._shown_step + every or (step == steps and step != self._shown_step)):
            self._shown_step = step
            self._print(Text("  ".join(figures(records))))

    def _moving_line(self) -> RenderableType:
        records = self._records
        grid = Table.grid(padding=(0, 2), expand=True)
        if records is None or records.status["state"] != "RUNNING" or not records.rows:
            grid.add_column(width=1)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            grid.add_row(self._spinner, self._waiting_text())
            return grid
        step, *others = figures(records)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, records.status["steps"]), completed=records.step)
        grid.add_row(step, bar, "  ".join(others))
        return grid

    def _waiting_text(self) -> Text:
        """Describes a run that has no steps yet: its state, its ranks' states, the elapsed time."""
        elapsed = duration(time.monotonic() - self._started)
        if self._records is None:
            return Text(f"waiting for the run to start  {elapsed}")
        status, step = self._records.status, self._records.step
        parts = [state_text(status["state"])]
        if step:
            parts.append(Text(f"step {step}/{status['steps']}"))
        if counts := Counter(rank["state"] for rank in status["ranks"]):
            parts.append(Text("ranks: " + ", ".join(f"{count} {state}" for state, count in counts.items())))
        return Text.assemble(*(piece for part in parts for piece in (part, "  ")), (elapsed, "dim"))


def figures(records: Records) -> list[str]:
    """Returns step, loss, speed and the time left."""
    steps, left = records.status["steps"], records.seconds_left
    row = records.rows[-1] if records.rows else {"loss": None, "tokens_per_s": None}
    return [
        f"step {records.step:>{len(str(steps))}}/{steps}",
        f"loss {loss_text(row['loss'])}",
        f"{quantity(row['tokens_per_s'])} tokens/s",
        *([f"ETA {duration(left)}"] if left is not None else []),
    ]


def summary_view(records: Records, console: Console) -> RenderableType:
    """Shows the end of a run, or its current state: figures, loss curve."""
    status, rows, events = records.status, records.rows, records.events
    first, last = (rows[0], rows[-1]) if rows else (None, None)
    loss = f"{loss_text(last['loss'])}  (step {first['step']}: {loss_text(first['loss'])})" if first and last else "–"
    pairs: list[tuple[str, RenderableType]] = [
        ("steps", f"{records.step} of {status['steps']}"),
        ("final loss", loss),
        *(
            ("held-out loss", f"{loss_text(event.number('loss'))}  (step {event.step})")
            for event in [event for event in events if event.kind == "evaluated"][-1:]
        ),
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
    return Group(*parts, Text(""))


def next_commands(place: RunPlace, status: Mapping[str, Any], again: str) -> list[tuple[str, str]]:
    """Returns useful commands, each with its purpose. `again`: that which submitted the run."""
    name, resume, commands = shell_word(place.name), f"{again} --resume", []
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
            commands.append((f"raypp generate {name} --prompt 'In the'", "what the model writes"))
        commands.append((f"raypp checkpoints verify {name}", "read and check every byte"))
        if status["state"] in ("FAILED", "STOPPED"):
            commands.append((resume, "resume from the checkpoint"))
        elif status["state"] == "SUCCEEDED":
            longer = re.sub(r" --set train\.steps=\S+", "", resume)
            commands.append((f"{longer} --set train.steps={2 * status['steps']}", "train longer"))
    elif status["state"] == "FAILED":
        commands.append((f"raypp delete {name}", "free the name, for another try"))
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
