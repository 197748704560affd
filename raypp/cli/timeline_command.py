"""`raypp timeline`: traces the next steps of a run, and shows where their time went."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding

from raypp.cli.console import Table, Text, wide_console
from raypp.cli.output import echo, write_file
from raypp.cli.render import facts
from raypp.control import client
from raypp.control.clusters import known_runs
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import ended_status, find_run, present_status
from raypp.errors import JobError, Problem, UnreachableError
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import is_final, seconds_text
from raypp.state.run_records.trace import MOST_STEPS, RankTrace, TracePlace, list_traces, newest_trace, read_trace
from raypp.storage import ObjectStore, open_store
from raypp.tools.chrome_trace import chrome_trace
from raypp.tools.trace_analysis import Analysis, RankTimes, analyse, measured_cards, measured_links
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
            fix = f"trace a run while it trains: `raypp timeline {shell_word(place.name)}`"
            fix = f"resume it, and {fix}" if ended else fix
            raise JobError(Problem("RUN", f"no complete trace of {place.name} is in its store", fix))
    else:
        trace = _next_steps(place, reader, store, steps)
    events = reader.events()
    attempt = trace[0].attempt
    analysis = analyse(trace, measured_links(events, attempt), measured_cards(events, attempt))
    wide_console().print(timeline_view(trace, analysis))
    if out is not None:
        write_file(out, json.dumps(chrome_trace(trace, analysis, events), separators=(",", ":")).encode())
        echo(f"wrote {out}: open it in https://ui.perfetto.dev or chrome://tracing")
    else:
        echo("with --out FILE the trace is written for https://ui.perfetto.dev")


def _next_steps(place: RunPlace, reader: RunReader, store: ObjectStore, steps: int) -> list[RankTrace]:
    """Asks the run's controller for a trace, and waits until all ranks have written their parts. If
    the attempt ends before that, its trace is lost, and the next attempt is asked."""
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
    while True:
        status = present_status(place, reader)
        answer = client.command_run(cluster, place, "timeline", steps)
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
    """Waits for the parts of all ranks; None if the attempt ends before they are written."""
    since = over = None
    while True:
        status = present_status(place, reader)  # before looking at the store: an ended attempt has written its parts
        traces = {key: ranks for key, ranks in list_traces(store, place.name).items() if key not in before}
        for key, ranks in traces.items():
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
            count = max(map(len, traces.values()))
            fix = f"`raypp events {shell_word(place.name)}` shows what the others report"
            raise UnreachableError(Problem("RUN", f"only {count} ranks have written their part of the trace", fix))
        time.sleep(_POLL_S)


def _not_traced(place: RunPlace, status: dict[str, Any]) -> JobError:
    fault = f"{place.name} is {status['state']} in attempt {status['attempt']}; the steps were not traced"
    return JobError(Problem("RUN", fault, "trace it earlier, or trace fewer steps"))


_MOST_RANKS = 64
_HARDLY = 0.005


def timeline_view(trace: Sequence[RankTrace], analysis: Analysis) -> RenderableType:
    """Shows steps, messages and prediction, and one line per rank."""
    first = trace[0]
    last = first.first_step + first.steps - 1
    steps = f"step {first.first_step}" if last == first.first_step else f"steps {first.first_step} to {last}"
    head = Text.assemble((first.run, "bold"), f"  {steps} of attempt {first.attempt}")
    pairs: list[tuple[str, RenderableType]] = [
        ("step", _spread(analysis.step_s)),
        ("pipeline", _spread(analysis.pipeline_s)),
        ("predicted", _predicted(analysis)),
        ("messages", _messages(analysis)),
        ("weights, sums", _weights_and_sums(analysis.ranks)),
        ("clocks", f"agree within {seconds_text(analysis.error_s)}" if analysis.error_s else "one host, one clock"),
    ]
    if any(one.cut for one in trace):
        pairs.append(("cut", "a rank did more than a trace holds; trace fewer steps"))
    parts: list[RenderableType] = [head, facts(pairs), Text("")]
    parts.append(Padding(_ranks(analysis.ranks), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    middle = seconds_text(statistics.median(seconds))
    low, high = seconds_text(min(seconds)), seconds_text(max(seconds))
    return middle if low == high else f"{middle}  ({low} to {high})"


def _predicted(analysis: Analysis) -> str:
    if analysis.prediction is None:
        return "–"
    makespan = analysis.prediction.makespan
    bubble = analysis.prediction.bubble
    text = f"{seconds_text(makespan)} for the pipeline, by simulation with the medians of these actions"
    return f"{text}; {bubble:.0%} of it is bubble"


def _messages(analysis: Analysis) -> str:
    if not analysis.messages:
        return "none between ranks"
    arrived = sum(message.arrived for message in analysis.messages)
    late = sum(message.under_way_s for message in analysis.messages)
    total = sum(one.total for one in analysis.ranks)
    share = f"{late / total:.1%} of the ranks' time" if total else seconds_text(late)
    return (
        f"{arrived} of {len(analysis.messages)} had arrived when they were needed; {share} waits for messages under way"
    )


def _weights_and_sums(ranks: Sequence[RankTimes]) -> str:
    under_way = sum(one.under_way for one in ranks)
    waited = sum(one.gathers + one.sums for one in ranks)
    if not under_way:
        return "no gather and no sum ran during compute"
    hidden = max(0.0, 1 - waited / under_way)
    return f"{hidden:.0%} of the time under way is hidden behind compute; ranks waited {seconds_text(waited)} in all"


def _ranks(ranks: Sequence[RankTimes]) -> RenderableType:
    shares = ("messages", "weights", "sums", "optimizer", "save", "other")
    table = Table("rank", "computes", "waits for", *shares, right=("computes", *shares), folded=("waits for",))
    labels = {one.trace.rank: one.trace.label for one in ranks}
    for one in ranks[:_MOST_RANKS]:
        waits = sum(one.waits_for.values())
        parts = one.parts
        optimizer, save = parts.get("optimizer", 0.0), parts.get("save", 0.0) + parts.get("memory", 0.0)
        sums = one.sums + parts.get("reduce", 0.0)
        named = one.compute + waits + one.messages + one.gathers + sums + optimizer + save
        table.add_row(
            Text(one.trace.label, style="bold"),
            _share(one.compute, one),
            _peers(one, labels),
            _share(one.messages, one),
            _share(one.gathers, one),
            _share(sums, one),
            _share(optimizer, one),
            _share(save, one),
            _share(max(0.0, one.total - named), one),
        )
    more = len(ranks) - _MOST_RANKS
    return Group(table, Text(f"and {more} more ranks", style="dim")) if more > 0 else table


def _share(seconds: float, one: RankTimes) -> str:
    share = seconds / one.total if one.total else 0.0
    return f"{share:.0%}" if share >= _HARDLY else "–"


def _peers(one: RankTimes, labels: dict[int, str]) -> str:
    """Names the peers that had not sent yet, the longest wait first."""
    longest = sorted(one.waits_for.items(), key=lambda pair: -pair[1])
    shown = [f"{labels[rank]} {_share(s, one)}" for rank, s in longest if one.total and s / one.total >= _HARDLY]
    return ", ".join(shown) or "–"
