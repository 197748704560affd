"""The tables of a report: figures, checkpoints, events, samples, and the job."""

import json
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import yaml

from raypp.records import Event
from raypp.state.run_records.status import date_and_clock, duration, loss_text, quantity, speed_text
from raypp.tools.report.charts import Axis, step_axis
from raypp.tools.report.collect import RunData
from raypp.tools.report.html import Html, joined, tag

_MOST_EVENTS = 300
_MOST_CHECKPOINTS = 30
_MOST_SAMPLES = 12
_MOST_FIELDS = 300
_LONGEST_JOB = 60_000


def figures(run: RunData) -> Html:
    """Shows the run's main figures."""
    status = run.status
    step, steps = status["step"], status["steps"]
    pairs = [
        (f"step of {steps:,}" if steps else "step", f"{step:,}"),
        ("loss", loss_text(status["loss"])),
        ("tokens/s", speed_text(status)),
        ("tokens", quantity(float(sum(timed.report.tokens for timed in run.steps)))),
        ("time in steps", duration(sum(timed.report.step_s for timed in run.steps))),
        ("restarts", str(status["restarts"])),
    ]
    if run.waited_s is not None:
        pairs.append(("waited in line", duration(run.waited_s)))
    if run.evaluations and isinstance(loss := run.evaluations[-1]["loss"], float):
        pairs.insert(2, ("held-out loss", loss_text(loss)))
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), cls="figures")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: str = "") -> Html:
    """Returns a table; `numbers` has an `r` for each column that is aligned right."""

    def cell(name: str, index: int, value: object) -> Html:
        return tag(name, value, cls="r" if numbers[index : index + 1] == "r" else None)

    top = tag("tr", *(cell("th", index, name) for index, name in enumerate(head)))
    body = [tag("tr", *(cell("td", index, value) for index, value in enumerate(row))) for row in rows]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), cls="scroll")


def checkpoints(run: RunData) -> Html:
    """Lists the newest checkpoints with what their saves reported."""
    if not run.checkpoints:
        return tag("p", "No checkpoint is in the store.", cls="quiet")
    saves = {event.step: event for event in run.events if event.kind == "committed"}
    rows = []
    for one in reversed(run.checkpoints[-_MOST_CHECKPOINTS:]):
        save = saves.get(one.step)
        size, seconds, stall = (save.number(key) if save else None for key in ("bytes", "seconds", "stall_s"))
        rows.append(
            (
                f"{one.step:,}",
                date_and_clock(save.time) if save else date_and_clock(one.modified),
                "–" if size is None else f"{size / 1e6:,.1f} MB",
                "–" if seconds is None else f"{seconds:.2f} s",
                "–" if stall is None else f"{stall * 1e3:.0f} ms",
            )
        )
    left_out = len(run.checkpoints) - len(rows)
    note = tag("p", f"{left_out} older ones are not listed.", cls="quiet") if left_out > 0 else None
    return joined(_table(("step", "committed", "size", "save took", "training waited"), rows, "r rrr"), note)


def events(run: RunData) -> Html:
    shown = list(reversed(run.events[-_MOST_EVENTS:]))
    rows = [
        (
            date_and_clock(event.time),
            tag("span", event.kind, cls=f"kind {class_of(event.kind)}"),
            str(event.attempt or "–"),
            "–" if event.step is None else f"{event.step:,}",
            "–" if event.rank is None else str(event.rank),
            event.message,
        )
        for event in shown
    ]
    left_out = len(run.events) - len(shown)
    note = tag("p", f"{left_out:,} older events are not listed.", cls="quiet") if left_out > 0 else None
    return joined(_table(("time", "event", "attempt", "step", "rank", "message"), rows, "  rrr "), note)


def samples(run: RunData) -> Html | None:
    """Shows the newest samples; None without any."""
    sampled = [event for event in run.events if class_of(event.kind) == "sample"][-_MOST_SAMPLES:]
    return tag("div", *(_sample(event) for event in reversed(sampled)), cls="samples") if sampled else None


def _sample(event: Event) -> Html:
    head = tag("h4", f"step {event.step:,}" if event.step is not None else date_and_clock(event.time))
    listed = event.details.get("samples")
    pairs = [one for one in listed if isinstance(one, dict)][:8] if isinstance(listed, list) else [event.details]
    pairs = [one for one in pairs if "prompt" in one or "text" in one]
    texts = [(str(one.get("prompt", "")), str(one.get("text", one.get("completion", "")))) for one in pairs]
    shown = [tag("pre", tag("b", prompt), text) for prompt, text in texts]
    return tag("article", head, *(shown or [tag("pre", event.message)]))


def job(run: RunData) -> Html:
    if run.job is None:
        return tag("p", "The job cannot be read.", cls="quiet")
    text = yaml.safe_dump(run.job, sort_keys=False, allow_unicode=True, width=100)
    cut = text if len(text) <= _LONGEST_JOB else text[:_LONGEST_JOB] + "\n…"
    lines = [cut[start : start + 2000] for start in range(0, len(cut), 2000)]
    return tag("details", tag("summary", "every key, defaults included"), tag("pre", *lines))


def differences(one: RunData, other: RunData) -> Html:
    """Lists the keys of the jobs whose values differ."""
    left, right = dict(_fields(one.job or {})), dict(_fields(other.job or {}))
    rows = [
        (key, left.get(key, "–"), right.get(key, "–"))
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key) != right.get(key) and key != "name"
    ]
    if not rows:
        return tag("p", "The jobs differ in nothing but their names.", cls="quiet")
    note = tag("p", f"{len(rows) - _MOST_FIELDS} more keys differ.", cls="quiet") if len(rows) > _MOST_FIELDS else None
    return joined(_table(("key", one.title, other.title), rows[:_MOST_FIELDS]), note)


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def written_at() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z")


# The strip below the curves: attempts, and events, over the same steps.

CLASSES = {
    "failure": ("rank_failed", "failed", "save_failed", "step_skipped", "trace_failed", "prune_failed"),
    "restart": ("restarting", "reshaped", "controller_restarted", "preemption_notice", "restored"),
    "checkpoint": ("committed",),
    "sample": ("sampled",),
    "notice": ("loss_spike", "loss_scale", "straggler", "lookahead", "node_left_out", "stop_requested", "stopped",
               "succeeded", "traced", "first_step", "save_waited", "save_skipped"),
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
    marks = []
    for attempt, steps in islice(
        groupby((timed.report for timed in run.steps), lambda one: one.attempt), _MOST_ATTEMPTS
    ):
        spanned = [report.step for report in steps]
        first, last = spanned[0], spanned[-1]
        left, right = axis.share(first), axis.share(last)
        title = f"attempt {attempt}: steps {first} to {last}"
        place = f"left:{left:.2f}%;width:{max(0.4, right - left):.2f}%"
        marks.append(tag("b", str(attempt), cls="attempt", style=place, title=title))
    return marks


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
    lines = [f"{date_and_clock(first.time)}  {first.kind}: {first.message[:200]}"]
    lines += [f"and {len(events) - 1} more near here"] if len(events) > 1 else []
    return tag("i", cls=f"mark {name}", style=f"left:{share:.2f}%", title="\n".join(lines))
