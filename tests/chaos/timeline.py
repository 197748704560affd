"""Splits the time of a disturbed run into training, redoing lost steps, and recovering."""

from dataclasses import dataclass
from typing import Any

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
    """Returns the intervals of a run, in order. An attempt trains from its `first_step` event, less
    the duration of that step, which the event states. It trains until the fault that ends it or,
    without one, until the failure is reported. The next attempt repeats the steps beyond its
    starting point, so the same number of steps at its start counts as redoing. The rest is
    recovering."""
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
            reported = failed[attempt].time
            stop = max([fault for fault in faults if start < fault <= reported][-1:] or [reported])
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
    return {kind: sum(part.seconds for part in parts if part.kind == kind) for kind in SIGNS}


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
