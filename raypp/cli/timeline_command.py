"""`raypp timeline`: traces the next steps of a run, and shows where their time went."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from raypp.api.find_run import ended_status, find_run, present_status
from raypp.cli.console import wide_console
from raypp.cli.output import echo, write_file
from raypp.cli.timeline_view import timeline_view
from raypp.clusters import known_runs
from raypp.clusters.find import Cluster
from raypp.clusters.known_runs import RunPlace
from raypp.control import client
from raypp.errors import JobError, Problem, UnreachableError
from raypp.observe.chrome_trace import chrome_trace
from raypp.observe.reader import RunReader
from raypp.observe.status import is_final
from raypp.observe.trace import MOST_STEPS, RankTrace, TracePlace, list_traces, newest_trace, read_trace
from raypp.observe.trace_analysis import analyse, measured_cards, measured_links
from raypp.storage import ObjectStore, open_store
from raypp.untrusted.text import shell_word

_POLL_S = 0.5
_ASK_EVERY_S = 2.0
_PARTS_PATIENCE_S = 30.0
"""Seconds that the other ranks' parts may take after the first part."""
_LATE_PARTS_S = 5.0
"""The same, after the attempt has ended."""


@click.command("timeline")
@click.argument("run")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), default=3, show_default=True, help="Steps to trace.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the trace to this file, for ui.perfetto.dev or chrome://tracing.",
)
@click.option("--recorded", is_flag=True, help="Show the newest trace in the store. Trace nothing.")
def timeline_command(run: str, steps: int, out: Path | None, recorded: bool) -> None:
    """Trace the next steps of RUN on all ranks, and show where their time goes.

    The trace stays in the run's store. For a run that has ended, shows the newest trace.
    """
    place, reader = find_run(run)
    store = open_store(place.url)
    ended = ended_status(reader) is not None
    if recorded or ended:
        trace = newest_trace(store, place.name)
        if trace is None:
            raise _none_recorded(place, ended=ended)
    else:
        trace = _next_steps(place, reader, store, steps)
    events = reader.events()
    attempt = trace[0].attempt
    found = analyse(trace, measured_links(events, attempt), measured_cards(events, attempt))
    console = wide_console()
    console.print(timeline_view(trace, found))
    if out is not None:
        write_file(out, json.dumps(chrome_trace(trace, found, events), separators=(",", ":")).encode())
        echo(f"wrote {out}: open it in https://ui.perfetto.dev or chrome://tracing")
    else:
        echo("with --out FILE the trace is written for https://ui.perfetto.dev")


def _next_steps(place: RunPlace, reader: RunReader, store: ObjectStore, steps: int) -> list[RankTrace]:
    """Asks the run's controller for a trace, and waits until all ranks have written their parts.

    If the attempt ends before that, its trace is lost, and the next attempt is asked.
    """
    cluster = known_runs.cluster_of(place)
    patient = False
    while True:
        before = set(list_traces(store, place.name))
        attempt = _asked(place, reader, cluster, steps, patient=patient)
        trace = _parts_of(place, reader, store, before, attempt)
        if trace is not None:
            return trace
        echo(f"{place.name}: attempt {attempt} ended before its steps were traced; asking the next attempt", err=True)
        patient = True


def _asked(place: RunPlace, reader: RunReader, cluster: Cluster, steps: int, *, patient: bool) -> int:
    """Asks for a trace. Returns the attempt that was asked.

    Args:
        patient: Wait until the run trains.

    Raises:
        JobError: The run does not train, or has ended.
    """
    while True:
        status = present_status(place, reader)
        answer = client.command_run(cluster, place, f"timeline-{steps}")
        if not answer["found"]:
            if patient and not is_final(status):
                time.sleep(_ASK_EVERY_S)  # Ray starts the controller again
                continue
            state = present_status(place, reader)["state"]
            raise client.no_such_controller(place.name, f"{state} according to its records")
        if answer["traced"]:
            echo(f"{place.name}: tracing {steps} steps, {answer['what']}", err=True)
            return int(present_status(place, reader)["attempt"])
        if not patient:
            fix = f"wait until it trains: `raypp status {shell_word(place.name)} --watch`"
            raise JobError(Problem("RUN", str(answer["what"]), fix))
        if is_final(status):
            raise _not_traced(place, status)
        time.sleep(_ASK_EVERY_S)


def _parts_of(
    place: RunPlace, reader: RunReader, store: ObjectStore, before: set[TracePlace], attempt: int
) -> list[RankTrace] | None:
    """Waits for the parts of all ranks; None if the attempt ends before they are written.

    Raises:
        JobError: The run has ended without them.
        UnreachableError: Some ranks of a running attempt have not written theirs.
    """
    since = over = None
    while True:
        status = present_status(place, reader)  # before looking at the store: an ended attempt has written its parts
        found = {key: ranks for key, ranks in list_traces(store, place.name).items() if key not in before}
        for key, ranks in found.items():
            since = since or time.monotonic()
            if len(ranks) == read_trace(store, place.name, key, ranks[:1])[0].world:
                return read_trace(store, place.name, key, ranks)
        if is_final(status) or status["attempt"] != attempt:
            over = over or time.monotonic()
        # The remaining ranks of an attempt write within seconds, if at all.
        if over is not None and (since is None or time.monotonic() - over > _LATE_PARTS_S):
            if is_final(status):
                raise _not_traced(place, status)
            return None
        if since is not None and time.monotonic() - since > _PARTS_PATIENCE_S:
            raise _incomplete(place, found)
        time.sleep(_POLL_S)


def _not_traced(place: RunPlace, status: dict[str, Any]) -> JobError:
    what = f"{place.name} is {status['state']} in attempt {status['attempt']}; the steps were not traced"
    return JobError(Problem("RUN", what, "trace it earlier, or trace fewer steps"))


def _none_recorded(place: RunPlace, *, ended: bool) -> JobError:
    fix = f"trace a run while it trains: `raypp timeline {shell_word(place.name)}`"
    fix = f"resume it, and {fix}" if ended else fix
    return JobError(Problem("RUN", f"no complete trace of {place.name} is in its store", fix))


def _incomplete(place: RunPlace, found: dict[TracePlace, list[int]]) -> UnreachableError:
    count = max(map(len, found.values()))
    fix = f"`raypp events {shell_word(place.name)}` shows what the others report"
    return UnreachableError(Problem("RUN", f"only {count} ranks have written their part of the trace", fix))
