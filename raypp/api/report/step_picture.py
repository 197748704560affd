"""One traced step as a picture: a row per rank, and below the simulation's, per pipeline rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypp.api.report.charts import ticks
from raypp.api.report.html import Html, joined, tag
from raypp.observe.chrome_trace import name_of
from raypp.observe.status import seconds_text
from raypp.observe.trace import RankTrace, Span
from raypp.observe.trace_analysis import Analysis

_MOST_RANKS = 24
_MOST_BLOCKS = 6000
_NARROWEST = 0.04
"""Percent of the step below which a block cannot be seen."""
_NUMBERED = 1.6
"""Percent of the step above which a block has room for its microbatch's number."""

CLASSES = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weights",
    "wait F": "wait",
    "wait B": "wait",
    "wait sends": "wait",
    "wait gather": "wait",
    "wait sums": "wait",
    "gather": "collective",
    "sum": "collective",
    "negotiate": "collective",
    "reduce": "collective",
    "clocks": "collective",
    "optimizer": "optimizer",
    "save": "save",
    "memory": "save",
    "data": "data",
}
LEGEND = (
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
    shown = [(one, [s for s in one.spans if s.step == step and s.kind in CLASSES]) for one in trace[:_MOST_RANKS]]
    everything = [span for _, spans in shown for span in spans]
    if not everything:
        return tag("p", "The trace has no step.", cls="quiet")
    begin, end = min(s.begin for s in everything), max(s.end for s in everything)
    scale = 100 / max(end - begin, 1e-9)
    each = max(50, _MOST_BLOCKS // (2 * len(shown)))
    rows = [_row(one.label, _blocks(spans, begin, scale, each)) for one, spans in shown]
    rows += _predicted(trace, analysis, step, begin, scale, each)
    keys = [tag("span", tag("b", cls=f"swatch {name}"), words) for name, words in LEGEND]
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
    return tag("i", number, cls=CLASSES[span.kind], style=place, title=title)


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
