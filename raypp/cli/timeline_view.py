"""Shows on the terminal where traced steps spend their time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from raypp.cli.console import Table, Text
from raypp.cli.render import facts
from raypp.observe.in_words import seconds_text
from raypp.observe.trace import RankTrace
from raypp.observe.trace_analysis import Analysis, RankTimes

_MOST_RANKS = 64
_HARDLY = 0.005


def timeline_view(trace: Sequence[RankTrace], found: Analysis) -> RenderableType:
    """Shows steps, messages and prediction, and one line per rank."""
    first = trace[0]
    last = first.first_step + first.steps - 1
    steps = f"step {first.first_step}" if last == first.first_step else f"steps {first.first_step} to {last}"
    head = Text.assemble((first.run, "bold"), f"  {steps} of attempt {first.attempt}")
    pairs: list[tuple[str, RenderableType]] = [
        ("step", _spread(found.step_s)),
        ("pipeline", _spread(found.pipeline_s)),
        ("predicted", _predicted(found)),
        ("messages", _messages(found)),
        ("weights, sums", _weights_and_sums(found.ranks)),
        ("clocks", f"agree within {seconds_text(found.error_s)}" if found.error_s else "one host, one clock"),
    ]
    if any(one.cut for one in trace):
        pairs.append(("cut", "a rank did more than a trace holds; trace fewer steps"))
    parts: list[RenderableType] = [head, facts(pairs), Text("")]
    parts.append(Padding(_ranks(found.ranks), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    middle = seconds_text(statistics.median(seconds))
    low, high = seconds_text(min(seconds)), seconds_text(max(seconds))
    return middle if low == high else f"{middle}  ({low} to {high})"


def _predicted(found: Analysis) -> str:
    if found.prediction is None:
        return "–"
    makespan = found.prediction.timeline.makespan
    bubble = found.prediction.timeline.bubble
    text = f"{seconds_text(makespan)} for the pipeline, by simulation with the medians of these actions"
    return f"{text}; {bubble:.0%} of it is bubble"


def _messages(found: Analysis) -> str:
    if not found.messages:
        return "none between ranks"
    arrived = sum(message.arrived for message in found.messages)
    late = sum(message.under_way_s for message in found.messages)
    total = sum(one.total for one in found.ranks)
    share = f"{late / total:.1%} of the ranks' time" if total else seconds_text(late)
    return f"{arrived} of {len(found.messages)} had arrived when they were needed; {share} waits for messages under way"


def _weights_and_sums(ranks: Sequence[RankTimes]) -> str:
    under_way = sum(one.under_way for one in ranks)
    waited = sum(one.gathers + one.sums for one in ranks)
    if not under_way:
        return "no gather and no sum ran during compute"
    hidden = max(0.0, 1 - waited / under_way)
    return f"{hidden:.0%} of the time under way is hidden behind compute; ranks waited {seconds_text(waited)} in all"


def _ranks(ranks: Sequence[RankTimes]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", no_wrap=True)
    for name in ("computes", "waits for", "messages", "weights", "sums", "optimizer", "save", "other"):
        table.add_column(name, justify="left" if name == "waits for" else "right", no_wrap=name != "waits for")
    labels = {one.trace.rank: one.trace.label for one in ranks}
    for one in ranks[:_MOST_RANKS]:
        waits = sum(one.waits_for.values())
        parts = one.parts
        optimizer, save = parts.get("optimizer", 0.0), parts.get("save", 0.0) + parts.get("memory", 0.0)
        sums = one.sums + parts.get("reduce", 0.0)
        named = one.compute + waits + one.messages + one.gathers + sums + optimizer + save
        table.add_row(
            Text(one.trace.label, style="bold"),
            _share(one.compute, one),
            _peers(one, labels),
            _share(one.messages, one),
            _share(one.gathers, one),
            _share(sums, one),
            _share(optimizer, one),
            _share(save, one),
            _share(max(0.0, one.total - named), one),
        )
    more = len(ranks) - _MOST_RANKS
    return Group(table, Text(f"and {more} more ranks", style="dim")) if more > 0 else table


def _share(seconds: float, one: RankTimes) -> str:
    share = seconds / one.total if one.total else 0.0
    return f"{share:.0%}" if share >= _HARDLY else "–"


def _peers(one: RankTimes, labels: dict[int, str]) -> str:
    """Names the peers that had not sent yet, the longest wait first."""
    longest = sorted(one.waits_for.items(), key=lambda pair: -pair[1])
    shown = [f"{labels[rank]} {_share(s, one)}" for rank, s in longest if one.total and s / one.total >= _HARDLY]
    return ", ".join(shown) or "–"
