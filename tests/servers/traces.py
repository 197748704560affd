"""A trace of two pipeline ranks, made from a simulation."""

from dataclasses import replace
from typing import Any

from raypp.planning.schedules.catalogue import build_program
from raypp.planning.schedules.simulate import StageTimes, simulate
from raypp.records import Coordinates
from raypp.state.run_records.trace import RankTrace, Span

TIMES = StageTimes([0.03, 0.04], [0.06, 0.08], link=0.005, first_whole=True)
STEP_S = 1.0


def two_ranks(steps: int = 2, times: StageTimes = TIMES, **changed: Any) -> list[RankTrace]:
    """Returns the parts of both ranks of a 1F1B pipeline with four microbatches."""
    timeline = simulate(build_program("1f1b", 2, 1, 4), times)
    found = []
    for pp in range(2):
        spans: list[Span] = []
        for number in range(steps):
            step, begin = 4 + number, number * STEP_S
            spans.append(Span("negotiate", begin, 0.01, step))
            start = end = begin + 0.01
            for slot in timeline.slots[pp]:
                action, at = slot.action, start + slot.start
                kind = "F" if action.kind == "F" else "B"
                if (pp == 1) == (kind == "F"):
                    spans.append(Span(f"wait {kind}", end, at - end, step, pp, action.microbatch))
                spans.append(Span(action.kind, at, slot.end - slot.start, step, pp, action.microbatch))
                end = start + slot.end
                if (pp == 0) == (kind == "F"):
                    spans.append(Span(f"send {kind}", end, 0.0, step, pp, action.microbatch))
            spans.append(Span("pipeline", start, timeline.makespan, step))
            spans.append(Span("step", begin, timeline.makespan + 0.01, step))
        spans.append(Span("gathering", 0.02, 0.03, 4, pp))
        spans.append(Span("summing", 0.03, 0.03, 4, pp))
        node = f"10.0.0.{pp + 1}"
        one = RankTrace(
            "r", 1, 4, steps, pp, 2, f"pp{pp}", Coordinates(pp), node, "cpu", 1.5e9, pp * 1e-4, tuple(spans)
        )
        found.append(replace(one, **changed))
    return found


def chrome_faults(document: dict[str, Any], error_s: float) -> list[str]:
    """Returns what is wrong with a Chrome trace: fields, times, nesting, arrows that go back."""
    found: list[str] = []
    rows: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    arrows: dict[int, dict[str, float]] = {}
    for event in document["traceEvents"]:
        if not {"ph", "ts", "pid", "tid", "name"} <= event.keys():
            found.append(f"a field is missing: {event}")
        if event["ph"] == "X":
            if not event["dur"] >= 0 or not event["ts"] >= 0:
                found.append(f"a negative time: {event}")
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
        elif event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
        elif event["ph"] not in "Mi":
            found.append(f"an unknown phase: {event}")
    for row, events in rows.items():
        open_: list[float] = []
        for ts, minus, name in sorted(events):
            while open_ and open_[-1] <= ts + 0.15:
                open_.pop()
            if open_ and ts - minus > open_[-1] + 0.15:
                found.append(f"{name} of {row} at {ts} ends after what encloses it")
            open_.append(ts - minus)
    found += [f"an arrow without an end: {arrow}" for arrow in arrows.values() if len(arrow) != 2]
    found += [f"{a} arrives before it is sent" for a in arrows.values() if a["f"] < a["s"] - error_s * 1e6 - 0.2]
    return found
