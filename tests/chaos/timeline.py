"""Splits the time of a disturbed run into training, redoing lost steps, and recovering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COLOURS = {"training": "#3b7a57", "redoing": "#e0a030", "recovering": "#b03a2e"}
SIGNS = {"training": "█", "redoing": "▒", "recovering": "·"}
_WIDTH = 100


@dataclass(frozen=True)
class Part:
    """An interval of time, in seconds since 1970."""

    kind: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def parts_of(run: Any, faults: list[float], begin: float, end: float) -> list[Part]:
    """Returns the intervals of a run, in order.

    An attempt trains from its `first_step` event, less the duration of that step, which the event
    states. It trains until the fault that ends it or, without one, until the failure is reported.
    The next attempt repeats the steps beyond its starting point, so the same number of steps at its
    start counts as redoing. The rest is recovering.
    """
    firsts = {event.attempt: event for event in run.events("first_step")}
    failed: dict[int, Any] = {}
    for event in run.events("rank_failed"):
        failed.setdefault(event.attempt, event)
    seconds = {row["step"]: row["step_s"] for row in run.history()}
    parts: list[Part] = []
    at, reached = begin, 0
    for attempt, first in sorted(firsts.items()):
        own = first.details["seconds"]["first step"]
        start = max(at, first.time - own)
        stop = end
        if attempt in failed:
            told = failed[attempt].time
            stop = max([fault for fault in faults if start < fault <= told][-1:] or [told])
        if start > at:
            parts.append(Part("recovering", at, min(start, end)))
        if start >= end:
            return parts
        again = sum(seconds.get(step, 0.0) for step in range(first.step, reached + 1))
        middle = min(start + again, stop)
        if again:
            parts.append(Part("redoing", start, middle))
        parts.append(Part("training", middle, min(stop, end)))
        reached = max(reached, (failed[attempt].step or 0) if attempt in failed else 0)
        at = min(stop, end)
    if at < end:
        parts.append(Part("recovering", at, end))
    return parts


def totals(parts: list[Part]) -> dict[str, float]:
    """Returns the seconds by kind."""
    return {kind: sum(part.seconds for part in parts if part.kind == kind) for kind in COLOURS}


def in_words(parts: list[Part]) -> str:
    """Returns a text chart, one row per minute: █ training, ▒ redoing, · recovering."""
    begin, end = parts[0].begin, parts[-1].end
    rows, at = [], begin
    while at < end:
        row = ""
        for column in range(min(_WIDTH, int((end - at) / 60 * _WIDTH) + 1)):
            moment = at + 60 * column / _WIDTH
            row += SIGNS[next((part.kind for part in parts if part.begin <= moment < part.end), "recovering")]
        rows.append(f"{(at - begin) / 60:3.0f} min {row}")
        at += 60
    return "\n".join([*rows, "        " + "   ".join(f"{sign} {kind}" for kind, sign in SIGNS.items())])


def to_svg(parts: list[Part], faults: list[float]) -> str:
    """Returns the same chart as SVG, with a tick above it for each fault."""
    begin, end = parts[0].begin, parts[-1].end
    minutes = int((end - begin) // 60) + 1
    height = 34 * minutes + 40
    shapes = []
    for part in parts:
        for minute in range(minutes):
            low, high = begin + 60 * minute, begin + 60 * (minute + 1)
            left, right = max(part.begin, low), min(part.end, high)
            if right > left:
                shapes.append(_box(60 + (left - low) * 15, 34 * minute + 14, (right - left) * 15, COLOURS[part.kind]))
    for fault in faults:
        minute, second = divmod(fault - begin, 60)
        if 0 <= minute < minutes:
            shapes.append(_box(60 + second * 15, 34 * minute + 6, 2, "#202020", 7))
    for minute in range(minutes):
        shapes.append(f'<text x="8" y="{34 * minute + 30}">{minute} min</text>')
    for place, (kind, colour) in enumerate(COLOURS.items()):
        shapes.append(_box(60 + 150 * place, height - 20, 12, colour, 12))
        shapes.append(f'<text x="{78 + 150 * place}" y="{height - 9}">{kind}</text>')
    shapes.append(f'<text x="{60 + 450}" y="{height - 9}">| a fault</text>')
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="980" height="{height}" {style}>\n{body}\n</svg>\n'


def _box(x: float, y: float, width: float, colour: str, height: float = 20) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>'
