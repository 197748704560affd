"""Puts the parts of a report together: one page without a single request."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import raypp
from raypp.state.run_records.status import LOST, mesh_text, rank_label, seconds_text
from raypp.state.run_records.trace import RankTrace, Span
from raypp.tools.chrome_trace import name_of
from raypp.tools.report import tables
from raypp.tools.report.charts import COLUMNS, axis_of, charts, legend, ticks
from raypp.tools.report.collect import RunData
from raypp.tools.report.html import Html, joined, tag
from raypp.tools.report.style import SCRIPT, STYLE
from raypp.tools.report.tables import CLASSES, strip
from raypp.tools.trace_analysis import Analysis, measured_links


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
    names = [tag("h3", tag("b", cls=f"key {style}"), run.title) for run, style in zip(runs, "ab", strict=False)]
    return [tag("div", name, part(run, style), cls="of") for name, run, style in zip(names, runs, "ab", strict=False)]


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


# The mesh as a picture: stages from left to right, replicas below each other, and their links.

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
    links, pipeline = measured_links(run.events), run.pipeline
    slowest: dict[int, float] = {}
    if pipeline is not None and len(links) == len(pipeline.rank_of_stage) - 1:
        for (one, other), seconds in zip(pairwise(pipeline.rank_of_stage), links, strict=True):
            if abs(one - other) == 1:
                slowest[max(one, other)] = max(seconds, slowest.get(max(one, other), 0.0))
    labels = [tag("small", seconds_text(slowest[pp])) if pp in slowest else None for pp in columns]
    return [tag("span", one, cls="link", title="a message between these stages") for one in labels]


# One traced step as a picture: a row per rank, and below the simulation's, per pipeline rank.

_MOST_RANKS = 24
_MOST_BLOCKS = 6000
_NARROWEST = 0.04
"""Percent of the step below which a block cannot be seen."""
_NUMBERED = 1.6
"""Percent of the step above which a block has room for its microbatch's number."""

_COLOURS_OF = {
    "F": "forward", "B": "backward", "I": "backward", "W": "weights", "optimizer": "optimizer", "data": "data",
    **dict.fromkeys(("wait F", "wait B", "wait sends", "wait gather", "wait sums"), "wait"),
    **dict.fromkeys(("gather", "sum", "negotiate", "reduce", "clocks"), "collective"),
    **dict.fromkeys(("save", "memory"), "save"),
}  # fmt: skip
_STEP_LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weights", "gradient of weights"),
    ("wait", "waits"),
    ("collective", "collectives"),
    ("optimizer", "optimizer"),
    ("save", "save"),
)


def step_picture(trace: Sequence[RankTrace], analysis: Analysis) -> Html:
    """Draws the step whose time is the median of those traced."""
    step = _usual_step(trace, analysis)
    shown = [(one, [s for s in one.spans if s.step == step and s.kind in _COLOURS_OF]) for one in trace[:_MOST_RANKS]]
    everything = [span for _, spans in shown for span in spans]
    if not everything:
        return tag("p", "The trace has no step.", cls="quiet")
    begin, end = min(s.begin for s in everything), max(s.end for s in everything)
    scale = 100 / max(end - begin, 1e-9)
    each = max(50, _MOST_BLOCKS // (2 * len(shown)))
    rows = [_row(one.label, _blocks(spans, begin, scale, each)) for one, spans in shown]
    rows += _predicted(trace, analysis, step, begin, scale, each)
    keys = [tag("span", tag("b", cls=f"swatch {name}"), words) for name, words in _STEP_LEGEND]
    left_out = len(trace) - len(shown)
    caption = f"step {step}, {seconds_text(end - begin)}"
    if analysis.error_s:
        caption += f"; the hosts' clocks agree within {seconds_text(analysis.error_s)}"
    caption += f"; {left_out} more ranks are not shown" if left_out else ""
    axis = tag("div", tag("span", cls="lane"), tag("div", *_times(end - begin), cls="x"), cls="row")
    picture = tag("div", *rows, axis, cls="step")
    return joined(
        tag("p", caption, cls="quiet"), tag("div", *keys, cls="legend"), tag("div", picture, cls="scroll wide")
    )


def _usual_step(trace: Sequence[RankTrace], analysis: Analysis) -> int:
    steps = sorted({span.step for span in trace[0].spans if span.kind == "step"})
    if len(steps) != len(analysis.step_s) or not steps:
        return trace[0].first_step
    return sorted(zip(analysis.step_s, steps, strict=True))[(len(steps) - 1) // 2][1]


def _row(label: str, blocks: Iterable[Html], more: str = "") -> Html:
    return tag("div", tag("span", label, cls="lane"), tag("div", *blocks, cls="track"), cls=f"row{more}")


def _blocks(spans: Iterable[Span], begin: float, scale: float, most: int) -> list[Html]:
    # Enclosing spans are drawn first, so they are behind the spans that they enclose.
    wide = [span for span in spans if span.seconds * scale >= _NARROWEST]
    if len(wide) > most:
        wide = sorted(wide, key=lambda span: -span.seconds)[:most]
    return [_block(span, begin, scale) for span in sorted(wide, key=lambda span: (span.begin, -span.seconds))]


def _block(span: Span, begin: float, scale: float) -> Html:
    width = span.seconds * scale
    number = str(span.microbatch) if span.microbatch >= 0 and width >= _NUMBERED and span.kind in "FBIW" else ""
    stage = f", stage {span.stage}" if span.stage >= 0 else ""
    title = f"{name_of(span)}{stage}: {seconds_text(span.seconds)} from {seconds_text(max(0.0, span.begin - begin))} on"
    place = f"left:{(span.begin - begin) * scale:.3f}%;width:{width:.3f}%"
    return tag("i", number, cls=_COLOURS_OF[span.kind], style=place, title=title)


def _predicted(
    trace: Sequence[RankTrace], analysis: Analysis, step: int, begin: float, scale: float, most: int
) -> list[Html]:
    if analysis.prediction is None:
        return []
    starts = [s.begin for one in trace for s in one.spans if s.kind == "pipeline" and s.step == step]
    start = min(starts, default=begin)
    timeline = analysis.prediction
    rows = [tag("p", f"predicted: {seconds_text(timeline.makespan)} for the pipeline", cls="quiet")]
    for pp in sorted(timeline.slots)[:_MOST_RANKS]:
        spans = [
            Span(
                slot.action.kind,
                start + slot.start,
                slot.end - slot.start,
                step,
                slot.action.stage,
                slot.action.microbatch,
            )
            for slot in timeline.slots[pp]
            if (start + slot.end - begin) * scale <= 100.5
        ]
        rows.append(_row(f"pp{pp}", _blocks(spans, begin, scale, most), " predicted"))
    return rows


def _times(seconds: float) -> list[Html]:
    labels = []
    for tick in ticks(0.0, seconds, 5):
        words = seconds_text(tick) if tick else "0"
        labels.append(tag("span", words, style=f"left:{100 * tick / seconds:.2f}%"))
    return labels
