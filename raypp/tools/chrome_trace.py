"""A trace as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
Each rank is a process. Its first row is what it did; further rows are what was under way beside
that. Arrows lead from sends to what needs them. The process `predicted` is the simulation."""

from collections.abc import Iterable, Sequence
from typing import Any

from raypp.records import Event
from raypp.state.run_records.trace import RankTrace, Span
from raypp.tools.trace_analysis import Analysis
from raypp.untrusted.text import visible

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for input",
    "W": "backward for weights",
    "send F": "send activations",
    "send B": "send gradients",
    "wait F": "wait for activations",
    "wait B": "wait for gradients",
    "gather": "begin gather",
    "sum": "begin sum",
    "wait gather": "wait for weights",
    "wait sums": "wait for sums",
    "wait sends": "wait for sends",
    "gathering": "weights under way",
    "summing": "sums under way",
    "exchanging": "exchange between replicas",
    "negotiate": "agree",
    "reduce": "sum of loss and norms",
}
_BESIDE = ("gathering", "summing")
_EXCHANGES = 1000
"""The row of exchanges between replicas that train apart."""
_SAVES = ("committed", "save_failed")


def chrome_trace(ranks: Sequence[RankTrace], analysis: Analysis, events: Iterable[Event] = ()) -> dict[str, Any]:
    """Returns the trace as a JSON object. Times are microseconds since the trace's first span.
    `events`: those of the run; the ones within the trace are shown."""
    zero = min((span.begin for one in ranks for span in one.spans), default=0.0)
    end = max((span.end for one in ranks for span in one.spans), default=0.0)
    trace_events: list[dict[str, Any]] = []
    for one in ranks:
        trace_events += _named(one.rank + 1, f"{one.label} · rank {one.rank} · {one.node}", one.rank + 1)
        trace_events += _rank(one, zero)
    for number, message in enumerate(analysis.messages):
        needed = max(message.wait.end, message.send.begin)
        arrow = {"name": "message", "cat": "message", "id": number}
        start = _place(message.sender + 1, 1, message.send.begin - zero)
        trace_events.append({**arrow, "ph": "s", **start})
        trace_events.append({**arrow, "ph": "f", "bp": "e", **_place(message.receiver + 1, 1, needed - zero)})
    after = 2 + max((one.rank for one in ranks), default=0)
    trace_events += _predicted(ranks, analysis, after, zero)
    trace_events += _events(ranks, events, zero, end)
    run = ranks[0]
    about = {"run": run.run, "attempt": run.attempt, "first step": run.first_step, "steps": run.steps}
    return {
        "displayTimeUnit": "ms",
        "otherData": {**about, "clocks agree within (us)": round(analysis.error_s * 1e6, 1)},
        "traceEvents": trace_events,
    }


def _place(process: int, thread: int, seconds: float) -> dict[str, Any]:
    return {"ts": round(seconds * 1e6, 1), "pid": process, "tid": thread}


def _named(process: int, name: str, position: int) -> list[dict[str, Any]]:
    at = {"ph": "M", "ts": 0, "pid": process, "tid": 1}
    return [
        {**at, "name": "process_name", "args": {"name": visible(name)}},
        {**at, "name": "process_sort_index", "args": {"sort_index": position}},
    ]


def _row(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": process, "tid": thread, "name": "thread_name", "args": {"name": visible(name)}}


def _complete(process: int, thread: int, name: str, kind: str, begin: float, seconds: float, **more: Any) -> Any:
    # Both ends are rounded, so that what touches still touches.
    ts, end = round(begin * 1e6, 1), round((begin + seconds) * 1e6, 1)
    duration = round(max(0.0, end - ts), 1)
    return {
        "ph": "X", "ts": ts, "dur": duration, "pid": process, "tid": thread, "name": visible(name), "cat": kind,
        "args": more,
    }  # fmt: skip


def name_of(span: Span) -> str:
    """Returns a span's name: `forward 3`, `agree`."""
    words = WORDS.get(span.kind, span.kind)
    number = span.step if span.kind == "step" else span.microbatch
    return f"{words} {number}" if number >= 0 else words


def _rank(one: RankTrace, zero: float) -> Iterable[dict[str, Any]]:
    yield _row(one.rank + 1, 1, "actions")
    if any(span.kind == "exchanging" for span in one.spans):
        yield _row(one.rank + 1, _EXCHANGES, "exchange between replicas")
    ends: list[float] = []
    for span in sorted(one.spans, key=lambda span: (span.begin, -span.seconds)):
        lane = 1
        if span.kind in _BESIDE:
            free = next((i for i, end in enumerate(ends) if end <= span.begin), None)
            if free is None:
                free = len(ends)
                ends.append(0.0)
                yield _row(one.rank + 1, 2 + free, "under way")
            ends[free] = span.end
            lane = 2 + free
        elif span.kind == "exchanging":
            lane = _EXCHANGES
        where = {"step": span.step} | ({"stage": span.stage} if span.stage >= 0 else {})
        kind = WORDS.get(span.kind, "part")
        yield _complete(one.rank + 1, lane, name_of(span), kind, span.begin - zero, span.seconds, **where)


def _predicted(ranks: Sequence[RankTrace], analysis: Analysis, process: int, zero: float) -> Iterable[dict[str, Any]]:
    if analysis.prediction is None:
        return
    yield from _named(process, "predicted", process)
    slots = analysis.prediction.slots
    for pp in sorted(slots):
        yield _row(process, pp + 1, f"pp{pp}")
    begins: dict[int, float] = {}
    for one in ranks:
        for span in one.spans:
            if span.kind == "pipeline":
                begins[span.step] = min(begins.get(span.step, span.begin), span.begin)
    took, ended = max((slot.end for line in slots.values() for slot in line), default=0.0), zero
    for step, begin in sorted(begins.items()):
        begin = max(begin, ended)  # a row shows one step at a time
        ended = begin + took
        for pp, line in slots.items():
            for slot in line:
                action = slot.action
                span = Span(action.kind, begin - zero + slot.start, slot.end - slot.start, step, action.stage)
                name = f"{WORDS[action.kind]} {action.microbatch}"
                where = {"step": step, "stage": action.stage}
                yield _complete(process, pp + 1, name, WORDS[action.kind], span.begin, span.seconds, **where)


def _events(ranks: Sequence[RankTrace], events: Iterable[Event], zero: float, end: float) -> Iterable[dict[str, Any]]:
    """Shows the run's events as instants, and saves as long as they took."""
    began = ranks[0].began
    shown = [event for event in events if zero <= event.time - began <= end + 1.0]
    if not shown:
        return
    yield from _named(0, "run", 0)
    yield _row(0, 1, "events")
    for event in shown:
        seconds = event.number("seconds") or 0.0
        at = event.time - began - zero
        if event.kind in _SAVES and 0 < seconds < 1e9:
            name, begin = f"save of step {event.step}", max(0.0, at - seconds)
            yield _complete(0, 2, name, "save", begin, at - begin, message=visible(event.message))
        else:
            name, args = visible(event.kind), {"message": visible(event.message)}
            yield {"ph": "i", "s": "g", **_place(0, 1, at), "name": name, "cat": "event", "args": args}
