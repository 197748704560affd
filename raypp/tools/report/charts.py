"""Curves over the steps of one or two runs, with axes in HTML so that text keeps its size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import fmean

from raypp.state.run_records.quantities import CURVES, EXTRAS
from raypp.tools.report.collect import RunData
from raypp.tools.report.html import Html, Whole, joined, tag

COLUMNS = 600
"""Columns of a curve. With more steps, each column shows its smallest and its largest value."""
_MEANS = 120
"""Columns of the line of means. A curve with more than twice as many steps gets this line."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Series:
    """One curve. `style`: its class: `a` and `b` for runs; `eval` adds dots. `points`: ascending
    steps, and values; values may be NaN or infinite. `means`: the line of means over them."""

    label: str
    style: str
    points: Points
    means: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """The steps that all charts of a page span."""

    first: int
    last: int

    def share(self, step: float) -> float:
        """Returns where a step is, in percent of the width."""
        where = 100 * (step - self.first) / max(1, self.last - self.first)
        return min(100.0, max(0.0, where))


def axis_of(runs: Sequence[RunData]) -> Axis:
    steps = [timed.report.step for run in runs for timed in (*run.steps[:1], *run.steps[-1:])]
    return Axis(min(steps, default=0), max(steps, default=1))


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _columns(points: Points, count: int) -> list[list[tuple[int, float]]]:
    """Returns the points of each column of equally many steps, without empty columns."""
    first, width = points[0][0], (points[-1][0] - points[0][0] + 1) / count
    return [list(column) for _, column in groupby(points, lambda point: int((point[0] - first) / width))]


def thinned(points: Points) -> list[tuple[int, float]]:
    """Returns the finite points, at most the smallest and the largest of each column."""
    finite = _finite(points)
    if len(finite) <= 2 * COLUMNS:
        return finite
    ends = [{min(column, key=itemgetter(1)), max(column, key=itemgetter(1))} for column in _columns(finite, COLUMNS)]
    return [point for both in ends for point in sorted(both)]


def means(points: Points) -> list[tuple[float, float]]:
    """Returns the mean step and value of each of 120 columns; nothing for a short curve."""
    finite = _finite(points)
    if len(finite) <= 2 * _MEANS:
        return []
    inner = [(fmean(s for s, _ in column), fmean(v for _, v in column)) for column in _columns(finite, _MEANS)]
    # The curve's own ends, so that the line begins and ends where the curve does.
    return [(finite[0][0], inner[0][1]), *inner, (finite[-1][0], inner[-1][1])]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns round numbers between two values."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    width = next(unit * scale for unit in (1, 2, 2.5, 5, 10) if unit * scale >= raw * 0.999)
    first = math.ceil(low / width - 1e-9)
    values: list[float] = []
    while (tick := first * width) <= high + 1e-9 * width and len(values) < 4 * count:
        values.append(tick)
        first += 1
    return values


def number(value: float) -> str:
    """Formats a value of an axis: 1.2k, 0.003, 3e-05."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= size < 1e15:
            return f"{value / limit:.4g}{unit}"
    return "0" if size < 1e-300 else f"{value:.4g}"


def chart(
    name: str, unit: str, series: Sequence[Series], axis: Axis, marks: Sequence[int], *, named: bool = False
) -> Html | None:
    """Draws the curves of one quantity. `unit`: its unit; may be empty. `named`: whether the chart
    has a legend. Returns None if there is nothing to draw."""
    shown = [
        Series(one.label, one.style, points, means(one.points)) for one in series if (points := thinned(one.points))
    ]
    if not shown:
        return None
    values = [value for one in shown for _, value in one.points]
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if not math.isfinite(room):
        return None
    low, high = (0.0 if 0 <= low < 0.35 * high else low - room), high + room
    marked = ticks(low, high)

    def top(value: float) -> float:
        return 100 * (high - value) / (high - low)

    grid = [tag("line", x1=0, x2=1000, y1=round(10 * top(v), 1), y2=round(10 * top(v), 1), cls="grid") for v in marked]
    begins = [tag("line", y1=0, y2=1000, x1=(x := round(10 * axis.share(s), 1)), x2=x, cls="begin") for s in marks]
    curves = [_curve(one, axis, top) for one in shown]
    box = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none", "aria_hidden": "true"}
    plot = tag(
        "div",
        *(tag("span", number(v), cls="y", style=f"top:{top(v):.2f}%") for v in marked),
        tag("svg", *grid, *begins, *curves, **box),
        tag("i", cls="hair"),
        cls="plot",
    )
    several = len(shown) > 1 or "b" in shown[0].style
    names = [
        tag(
            "span",
            tag("b", cls=f"key {one.style}") if several else None,
            one.label if named else None,
            tag("output"),
            title=one.label,
        )
        for one in shown
    ]
    legend = tag("span", *names, cls="legend")
    head = tag("figcaption", tag("strong", name), tag("small", f" {unit}" if unit else ""), legend)
    return tag("figure", head, plot, step_axis(axis), cls="chart", data_low=axis.first, data_high=axis.last)


def _curve(one: Series, axis: Axis, top: Callable[[float], float]) -> Html:
    at = [(round(10 * axis.share(step), 1), round(10 * top(value), 1)) for step, value in one.points]
    line = "M" + "L".join(f"{x:g} {y:g}" for x, y in at)
    points = " ".join(f"{step}:{value:.6g}" for step, value in one.points)
    pale = " pale" if one.means else ""
    curve = tag("path", d=Whole(line), cls=f"curve {one.style}{pale}", data_points=Whole(points))
    if one.means:
        middle = "L".join(f"{10 * axis.share(step):.1f} {10 * top(value):.1f}" for step, value in one.means)
        curve = joined(curve, tag("path", d=Whole(f"M{middle}"), cls=f"mean {one.style}"))
    if "eval" not in one.style and len(at) > 1:
        return curve
    dots = "".join(f"M{x:g} {y:g}h0" for x, y in at)
    return joined(curve, tag("path", d=Whole(dots), cls=f"dots {one.style}"))


def step_axis(axis: Axis) -> Html:
    """Returns the labels below a chart."""
    marked = [round(tick) for tick in ticks(axis.first, axis.last, 5) if abs(tick - round(tick)) < 1e-6]
    names = [
        tag(
            "span",
            f"{step:,}" if step < 100_000 else number(step),
            style=f"left:{(share := axis.share(step)):.2f}%",
            cls="end" if share > 96 else None,
        )
        for step in marked
    ]
    return tag("div", *names, cls="x", aria_hidden="true")


_MEMORY = ("Memory", "GB, peak of a rank so far")
_MOST_EXTRAS = 12
_EXTRAS = {one.name: (one.title, one.unit) for one in EXTRAS}


def charts(runs: Sequence[RunData], axis: Axis) -> list[Html]:
    """Draws all quantities that the runs recorded."""
    marks = attempt_begins(runs[0]) if len(runs) == 1 else []
    extras = sorted({name for run in runs for timed in run.steps for name in timed.report.values})[:_MOST_EXTRAS]
    drawn = []
    for one in CURVES:
        series = [_series(run, style, one.name, runs) for style, run in zip("ab", runs, strict=False)]
        if one.name == "loss":
            series += [_held_out(run, style, runs) for style, run in zip("ab", runs, strict=False)]
        if one.name == "seq_len" and len({value for curve in series for _, value in curve.points}) < 2:
            continue
        drawn.append(chart(one.title, one.unit, series, axis, marks, named=one.name == "loss" and len(runs) == 1))
    drawn.append(chart(*_MEMORY, _memory(runs), axis, marks, named=len(runs) == 1))
    for name in extras:
        series = [
            Series(_label(run, runs), style, [(t.report.step, t.report.values.get(name, math.nan)) for t in run.steps])
            for style, run in zip("ab", runs, strict=False)
        ]
        drawn.append(chart(*_EXTRAS.get(name, (name, "")), series, axis, marks))
    return [one for one in drawn if one is not None]


def _memory(runs: Sequence[RunData]) -> list[Series]:
    """Returns the curve of each run's fullest pipeline rank; of one run also the emptiest's."""
    curves = []
    for style, run in zip("ab", runs, strict=False):
        peaks = [(timed.report.step, timed.report.peak_bytes) for timed in run.steps if timed.report.peak_bytes]
        if not peaks:
            continue
        last = peaks[-1][1]
        fullest, emptiest = last.index(max(last)), last.index(min(last))
        ranks = [(style, fullest)] + ([("b", emptiest)] if len(runs) == 1 and emptiest != fullest else [])
        for look, rank in ranks:
            points = [(step, there[rank] / 1e9) for step, there in peaks if rank < len(there)]
            label = f"{run.title}, fullest stage" if len(runs) > 1 else f"pp{rank}"
            curves.append(Series(label, look, points))
    return curves


def legend(runs: Sequence[RunData]) -> Html | None:
    """Names the curves of two runs, once for all charts."""
    if len(runs) < 2:
        return None
    held = [_held_out(run, style, runs) for style, run in zip("ab", runs, strict=False) if run.evaluations]
    all_ = [*(Series(run.title, style, ()) for style, run in zip("ab", runs, strict=False)), *held]
    return tag("p", *(tag("span", tag("b", cls=f"key {one.style}"), one.label) for one in all_), cls="legend")


def _label(run: RunData, runs: Sequence[RunData]) -> str:
    return run.title if len(runs) > 1 else "training"


def _series(run: RunData, style: str, name: str, runs: Sequence[RunData]) -> Series:
    points = [(timed.report.step, float(getattr(timed.report, name))) for timed in run.steps]
    return Series(_label(run, runs), style, points)


def _held_out(run: RunData, style: str, runs: Sequence[RunData]) -> Series:
    points = [(one["step"], one["loss"]) for one in run.evaluations if isinstance(one["loss"], float)]
    return Series(f"{run.title}, held out" if len(runs) > 1 else "held out", f"{style} eval", points)


def attempt_begins(run: RunData) -> list[int]:
    """Returns the first step of every attempt but the first."""
    begins = [b.report.step for a, b in pairwise(run.steps) if a.report.attempt != b.report.attempt]
    return begins[:200]
