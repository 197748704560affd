"""The strip below the curves: attempts, and events, over the same steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from raypp.api.report.charts import Axis, step_axis
from raypp.api.report.collect import RunData
from raypp.api.report.html import Html, tag
from raypp.observe.in_words import date_and_clock
from raypp.records import Event

CLASSES = {
    "failure": ("rank_failed", "failed", "save_failed", "step_skipped", "trace_failed", "prune_failed"),
    "restart": ("restarting", "reshaped", "controller_restarted", "preemption_notice", "restored"),
    "checkpoint": ("committed",),
    "sample": ("sampled",),
    "notice": ("loss_spike", "straggler", "lookahead", "node_left_out", "stop_requested", "stopped", "succeeded",
               "traced", "first_step", "save_waited", "save_skipped"),
}  # fmt: skip
"""What a mark stands for. Other events are in the table only."""
_COLUMNS = 200
_MOST_ATTEMPTS = 300


def class_of(kind: str) -> str:
    """Returns what an event stands for; `other` if it has no mark."""
    return next((name for name, kinds in CLASSES.items() if kind in kinds), "other")


def strip(run: RunData, axis: Axis, style: str) -> Html:
    """Draws the attempts and the events of a run."""
    lanes = [tag("div", tag("span", "attempts", cls="lane"), tag("div", *_attempts(run, axis), cls="track"), cls="row")]
    for name in CLASSES:
        marks = _marks(run, axis, name)
        if marks:
            lanes.append(tag("div", tag("span", f"{name}s", cls="lane"), tag("div", *marks, cls="track"), cls="row"))
    return tag("div", *lanes, step_axis(axis), cls=f"strip {style}")


def _attempts(run: RunData, axis: Axis) -> list[Html]:
    spans: list[list[int]] = []
    for timed in run.steps:
        report = timed.report
        if spans and spans[-1][0] == report.attempt:
            spans[-1][2] = report.step
        else:
            spans.append([report.attempt, report.step, report.step])
    found = []
    for attempt, first, last in spans[:_MOST_ATTEMPTS]:
        left, right = axis.share(first), axis.share(last)
        what = f"attempt {attempt}: steps {first} to {last}"
        place = f"left:{left:.2f}%;width:{max(0.4, right - left):.2f}%"
        found.append(tag("b", str(attempt), cls="attempt", style=place, title=what))
    return found


def _marks(run: RunData, axis: Axis, name: str) -> list[Html]:
    times = [timed.time for timed in run.steps]
    columns: dict[int, list[tuple[float, Event]]] = {}
    for event in run.events:
        if event.kind in CLASSES[name]:
            share = axis.share(step_of(run, event, times))
            columns.setdefault(int(share / 100 * _COLUMNS), []).append((share, event))
    return [_mark(events, name) for _, events in sorted(columns.items())]


def step_of(run: RunData, event: Event, times: Sequence[float]) -> int:
    """Returns an event's step, else the last one that was done before it."""
    if event.step is not None:
        return event.step
    done = bisect_right(times, event.time)
    return run.steps[done - 1].report.step if done else 0


def _mark(events: Sequence[tuple[float, Event]], name: str) -> Html:
    share, first = events[0]
    told = [f"{date_and_clock(first.time)}  {first.kind}: {first.message[:200]}"]
    told += [f"and {len(events) - 1} more near here"] if len(events) > 1 else []
    return tag("i", cls=f"mark {name}", style=f"left:{share:.2f}%", title="\n".join(told))
