# The mesh as a picture: stages from left to right, replicas below each other, and their links.

"""Puts the parts of a report together: one page without a single request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import raypp
from raypp.api.report import tables
from raypp.api.report.charts import COLUMNS, axis_of, charts, legend
from raypp.api.report.collect import RunData
from raypp.api.report.html import Html, joined, tag
from raypp.api.report.step_picture import step_picture
from raypp.api.report.style import SCRIPT, STYLE
from raypp.api.report.tables import CLASSES, strip
from raypp.observe.status import LOST, mesh_text, rank_label, seconds_text
from raypp.observe.trace_analysis import measured_links


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


_MOST_ROWS, _MOST_COLUMNS = 16, 32
_NODE_COLOURS = 6


def mesh_picture(run: RunData) -> Html:
    """Draws every rank with its node, and what joins the stages."""
    ranks, mesh = run.status["ranks"], run.status["mesh"]
    if not ranks:
        return tag("p", "No rank has been placed.", cls="quiet")
    nodes = {node: index for index, node in enumerate(dict.fromkeys(str(rank["node"]) for rank in ranks))}
    rows: dict[tuple[int, ...], dict[int, Mapping[str, Any]]] = {}
    for rank in ranks:
        at = rank["coordinates"]
        rows.setdefault(tuple(index for axis, index in at.items() if axis != "pp"), {})[at["pp"]] = rank
    columns = sorted({rank["coordinates"]["pp"] for rank in ranks})[:_MOST_COLUMNS]
    cells: list[Html] = [_stages(run, pp) for pp in columns]
    head = _line(cells, [tag("span")] * len(columns), "line head")
    links = _links(run, columns)
    lines = [head]
    for place in sorted(rows)[:_MOST_ROWS]:
        row = [_rank(rows[place].get(pp), mesh, nodes) for pp in columns]
        lines.append(_line(row, links))
    left_out = len(ranks) - sum(len(rows[place].keys() & set(columns)) for place in sorted(rows)[:_MOST_ROWS])
    notes = [f"{mesh_text(mesh)}, {len(ranks)} ranks on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"]
    notes += [f"{left_out} more ranks are not shown"] if left_out else []
    grid = tag("div", *lines, cls="mesh", style=f"--columns:{len(columns)}")
    return joined(tag("p", "; ".join(notes), cls="quiet"), tag("div", grid, cls="scroll"))


def _line(cells: Sequence[Html], links: Sequence[Html], cls: str = "line") -> Html:
    """Returns a row of cells, each but the first after its link to the one before."""
    parts = [part for pair in zip(links, cells, strict=True) for part in pair]
    return tag("div", *parts[1:], cls=cls)


def _stages(run: RunData, pp: int) -> Html:
    pipeline = run.pipeline
    if pipeline is None or pp >= len(pipeline.stages_of_rank):
        return tag("div", tag("strong", f"pp {pp}"), cls="stage")
    layers = [_range(pipeline.layers_of_stage[stage]) for stage in pipeline.stages_of_rank[pp]]
    return tag("div", tag("strong", f"pp {pp}"), tag("small", f"layers {', '.join(layers)}"), cls="stage")


def _range(layers: Sequence[int]) -> str:
    if not layers:
        return "none"
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"


def _rank(rank: Mapping[str, Any] | None, mesh: Mapping[str, int], nodes: Mapping[str, int]) -> Html:
    if rank is None:
        return tag("div", cls="rank empty")
    bad = " bad" if rank["state"] in LOST else ""
    colour = nodes[str(rank["node"])] % _NODE_COLOURS
    return tag(
        "div",
        tag("strong", rank_label(rank["coordinates"], mesh)),
        tag("span", str(rank["node"]) or "this host", cls="node"),
        tag("small", f"rank {rank['rank']} · {rank['state']}"),
        cls=f"rank node{colour}{bad}",
    )


def _links(run: RunData, columns: Sequence[int]) -> list[Html]:
    """Returns the link to each pipeline rank from the one before."""
    links, pipeline = measured_links(run.events), run.pipeline
    slowest: dict[int, float] = {}
    if pipeline is not None and len(links) == len(pipeline.rank_of_stage) - 1:
        for (one, other), seconds in zip(pairwise(pipeline.rank_of_stage), links, strict=True):
            if abs(one - other) == 1:
                slowest[max(one, other)] = max(seconds, slowest.get(max(one, other), 0.0))
    labels = [tag("small", seconds_text(slowest[pp])) if pp in slowest else None for pp in columns]
    return [tag("span", one, cls="link", title="a message between these stages") for one in labels]
