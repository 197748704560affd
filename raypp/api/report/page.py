"""Puts the parts of a report together: one page without a single request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence

import raypp
from raypp.api.report import tables
from raypp.api.report.charts import COLUMNS, axis_of, charts, legend
from raypp.api.report.collect import RunData
from raypp.api.report.html import Html, tag
from raypp.api.report.mesh_picture import mesh_picture
from raypp.api.report.step_picture import step_picture
from raypp.api.report.strip import CLASSES, strip
from raypp.api.report.style import SCRIPT, STYLE


def page(runs: Sequence[RunData]) -> str:
    """Returns the page about one run, or about two side by side."""
    title = " and ".join(run.title for run in runs)
    sum_ = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{sum_}'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · raypp"),
        tag("style", Html(STYLE)),
    )
    axis = axis_of(runs)
    drawn = charts(runs, axis)
    most = max(len(run.steps) for run in runs)
    dashed = "dashed lines are restarts; " if len(runs) == 1 else ""
    note = f"Steps from left to right; {dashed}point at a curve to read it."
    if most > 2 * COLUMNS:
        every = -(-most // COLUMNS)
        note += f" Pale: the smallest and the largest value of every {every:,} of {most:,} steps. Strong: means."
    body = [tag("header", *(_head(run, style, len(runs)) for run, style in zip(runs, "ab", strict=False)), cls="top")]
    if drawn:
        body.append(_section("Curves", tag("p", note, cls="quiet"), legend(runs), tag("div", *drawn, cls="charts")))
    else:
        body.append(_section("Curves", tag("p", "No step is done yet.", cls="quiet")))
    body.append(_section("Attempts and events", _mark_legend(runs), *_each(runs, lambda run, s: strip(run, axis, s))))
    if len(runs) > 1:
        body.append(_section("Where the jobs differ", tables.differences(*runs)))
    if any(run.trace for run in runs):
        body.append(_section("A step, rank by rank", *_each(runs, _step)))
    body.append(_section("Mesh", *_each(runs, lambda run, s: mesh_picture(run))))
    body.append(_section("Checkpoints", *_each(runs, lambda run, s: tables.checkpoints(run))))
    if any(tables.samples(run) for run in runs):
        body.append(_section("Samples", *_each(runs, lambda run, s: tables.samples(run) or Html(""))))
    body.append(_section("Events", *_each(runs, lambda run, s: tag("div", tables.events(run), cls="events"))))
    body.append(_section("Job", *_each(runs, lambda run, s: tables.job(run))))
    body.append(tag("footer", f"written by raypp {raypp.__version__} on {tables.written_at()}"))
    main = tag("body", tag("main", *body), tag("script", Html(SCRIPT)))
    return "<!doctype html>\n" + tag("html", head, main, lang="en", cls="two" if len(runs) > 1 else None) + "\n"


def _section(title: str, *parts: Html | None) -> Html:
    return tag("section", tag("h2", title), *parts)


def _each(runs: Sequence[RunData], part: Callable[[RunData, str], Html]) -> list[Html]:
    """Returns a part for each run; with two, each below its name."""
    if len(runs) == 1:
        return [part(runs[0], "a")]
    return [tag("div", _name(run, style), part(run, style), cls="of") for run, style in zip(runs, "ab", strict=False)]


def _name(run: RunData, style: str) -> Html:
    return tag("h3", tag("b", cls=f"key {style}"), run.title)


def _head(run: RunData, style: str, count: int) -> Html:
    status = run.status
    state = tag("span", str(status["state"]), cls=f"state {str(status['state']).lower()}")
    key = tag("b", cls=f"key {style}") if count > 1 else None
    parts = [tag("h1", key, tag("span", run.title), state), tag("p", status["checkpoint"] or run.url, cls="quiet url")]
    if status["error"]:
        ended = status["state"] == "FAILED"
        text = status["error"] if ended else f"last failure: {status['error']}"
        parts.append(tag("p", text, cls="error" if ended else "note"))
    parts += [tag("p", note, cls="note") for note in run.notes]
    return tag("div", *parts, tables.figures(run), cls="run")


def _step(run: RunData, style: str) -> Html:
    if run.trace is None:
        return tag("p", "No step of this run was traced.", cls="quiet")
    return step_picture(*run.trace)


def _mark_legend(runs: Sequence[RunData]) -> Html:
    there = {event.kind for run in runs for event in run.events}
    names = [name for name, kinds in CLASSES.items() if there & set(kinds)]
    return tag("p", *(tag("span", tag("i", cls=f"mark {name}"), name) for name in names), cls="legend marks")
