"""Shows a plan on the terminal: `raypp plan`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding

from raypp.cli.console import Lines, Table, Text
from raypp.errors import size_text, three_digits
from raypp.job.job import Job
from raypp.job.models import with_experts
from raypp.job.precision import FP32
from raypp.planning.decision import RankMemory
from raypp.planning.forecast import Forecast
from raypp.planning.plan import Plan, PlannedRank
from raypp.planning.replica_sum_costs import ReplicaSums
from raypp.planning.schedules.picture import drawn
from raypp.planning.schedules.simulate import Slot
from raypp.planning.search import SearchResult
from raypp.state.run_records.status import seconds_text
from raypp.untrusted.text import shell_word

MOST_RANKS = 16
"""Larger worlds are shown with one line per pipeline rank."""

_PLAYED = "in {}, blocks not compiled; other: as planned"
_UNITS = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))


def plan_view(job: Job, plan: Plan, width: int, played: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """Shows a whole plan, in sections. `width`: width of the terminal, in columns. `played`: what
    `--exact` found for each pipeline rank."""
    parts: list[RenderableType] = [Text(plan.assumed, "yellow")] if plan.assumed else []
    facts = f"{job.model.kind}, {count_text(plan.parameters)} parameters, {plan.tokens_per_step:,} tokens per step"
    parts.append(Text.assemble((plan.name, "bold cyan"), f"  {facts}"))
    moment = f"in {_unit(plan)[1]}, on {plan.memory_device}, at the peak; every row full"
    for name, remark, body in (
        ("Mesh", _mesh(plan), _rank_map(plan)),
        ("Schedule", _schedule(job, plan), schedule_picture(plan.timeline, min(width - 2, 140))),
        ("Bubble", "", _bubble(plan)),
        ("Precision", "", _precision(job, plan)),
        ("Memory per rank", moment, _memory(plan)),
        *([("Memory of a played step", _PLAYED.format(_unit(plan)[1]), _played(plan, played))] if played else ()),
        ("Host memory per node", "", _host(plan)),
        ("Links", "", _links(plan)),
        ("Predicted step time", "", _predictions(plan.predictions, plan.lookahead)),
    ):
        heading = Lines.assemble(("\n" + name, "bold"), (f"  {remark}" if remark else "", ""))
        parts += [heading, Padding(body, (0, 0, 0, 2), expand=False)]
    parts += [Lines(f"\n{remark}") for remark in plan.remarks]
    return Group(*parts)


def _mesh(plan: Plan) -> str:
    axes = {name: size for name, size in plan.axes.items() if size > 1 and name != "ep"}
    ranks = f"{plan.world} rank{'s' if plan.world > 1 else ''}"
    product = " × ".join(f"{name} {size}" for name, size in axes.items())
    folded = f", ep {plan.axes['ep']} inside" if plan.axes.get("ep", 1) > 1 else ""
    return (f"{product} = {ranks}" if product else ranks) + folded


def _rank_map(plan: Plan) -> RenderableType:
    table = Table("ranks" if plan.world > MOST_RANKS else "rank", "place", "stage", "layers", rule=True)
    for ranks in _lines(plan):
        first, last = ranks[0], ranks[-1]
        numbers = str(first.rank) if first is last else f"{first.rank}–{last.rank}"
        place = first.label if first is last else f"{first.label} … {last.label}"
        table.add_row(numbers, place, ", ".join(map(str, first.stages)), _layers(first, len(plan.cut)))
    weights = f"the embedding counts as {plan.input_weight:.2g} layers, the head and loss as {plan.output_weight:.2g}"
    cut = Text(f"cut {' + '.join(map(str, plan.cut))}; {weights}", style="dim")
    return Group(table, cut) if len(plan.cut) > 1 else table


def _lines(plan: Plan) -> Iterable[Sequence[PlannedRank]]:
    if plan.world <= MOST_RANKS:
        yield from ([rank] for rank in plan.ranks)
        return
    for _, ranks in groupby(plan.ranks, key=lambda rank: rank.coordinates.pp):
        yield list(ranks)


def _layers(rank: PlannedRank, num_stages: int) -> str:
    spans = []
    for stage, (first, last) in zip(rank.stages, rank.layers, strict=True):
        count = last - first + 1
        layers = f"{first}–{last} ({count})" if count > 1 else f"{first} (1)" if count else ""
        ends = ["embedding"] if stage == 0 else []
        ends += [layers] if layers else []
        ends += ["head"] if stage == num_stages - 1 else []
        spans.append(" + ".join(ends))
    return ", ".join(spans)


def _schedule(job: Job, plan: Plan) -> str:
    rows = f"{job.train.micro_batch_size} × {job.data.seq_len} tokens"
    ahead = f", lookahead {plan.lookahead}" if plan.lookahead else ""
    return f"{plan.schedule}, {plan.microbatches} microbatches of {rows}{ahead}"


def _precision(job: Job, plan: Plan) -> str:
    dtypes = plan.decision.job.train.dtypes
    if job.train.precision == "auto":
        both = plan.memory_device == "cuda" and job.resources.device == "auto"
        return f"auto: {dtypes.name} on CUDA, fp32 on CPUs" if both else f"auto: {dtypes.summary}"
    if dtypes.fp8:
        beside = f", {job.train.fp8.bf16_layers} layers beside each" if job.train.fp8.bf16_layers else ""
        experts = "" if with_experts(job.model) is None or job.train.fp8.experts else ", experts"
        return f"{dtypes.summary}; in bf16: both ends{beside}{experts}"
    if dtypes.narrow_weights:
        return f"{dtypes.summary}; gradients summed in {dtypes.gradients.name}"
    if dtypes.compute is not FP32 or job.resources.device == "cpu":
        return dtypes.summary
    products = "TF32 (train.tf32: false for fp32)" if job.train.tf32 else "fp32 (train.tf32: false)"
    return f"{dtypes.summary}; on CUDA, matrix products in {products}"


def _bubble(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    rounds = "m" if len(plan.cut) == len(plan.placement) else "v·m"
    table.add_row(f"{plan.bubble_fraction:.2%}", "fraction", Text(f"idle share of a step, (P-1)/({rounds}+P-1)", "dim"))
    table.add_row(f"{plan.bubble_overhead:.2%}", "overhead", Text(f"idle relative to the work, (P-1)/{rounds}", "dim"))
    text = "idle share of a step with this cut's costs and free links"
    table.add_row(f"{plan.simulated_bubble:.2%}", "simulated", Text(text, "dim"))
    return table


def _memory(plan: Plan) -> RenderableType:
    rows = [_parts_of(memory) for memory in plan.memory]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table("", *shown, right=shown, rule=True)
    divisor, _ = _unit(plan)
    for pp, row in enumerate(rows):
        cells = [Text(three_digits(row[name] / divisor), style="bold" if name == "total" else "") for name in shown]
        table.add_row(f"pp{pp}", *cells)
    return table


def _played(plan: Plan, played: Sequence[Mapping[str, Any]]) -> RenderableType:
    columns = ("planned", "played", "difference", "peak at", "other", "total")
    table = Table("", *columns, right=columns, rule=True)
    divisor, _ = _unit(plan)
    for row in played:
        planned, actual, other, total = (row[name] for name in ("planned", "played", "rest", "total"))
        sizes = [three_digits(size / divisor) for size in (planned, actual, other, total)]
        difference = f"{planned / actual - 1:+.1%}"
        table.add_row(f"pp{row['pp']}", *sizes[:2], difference, row["at"], sizes[2], Text(sizes[3], style="bold"))
    have, need = plan.predictions[-1].device_memory, max(row["total"] for row in played)
    if not have:
        return table
    fits = "fits" if need <= have else "does not fit"
    text = f"{fits}: a rank needs {size_text(need)}, a {plan.predictions[-1].device} has {size_text(have)}"
    return Group(table, Text(text, "" if need <= have else "red"))


def _parts_of(memory: RankMemory) -> dict[str, int]:
    """Returns the columns of the memory table; a terminal of 80 columns has no room for more."""
    parts = memory.as_dict()
    total = parts.pop("total")
    rest = sum(parts.pop(name) for name in ("working", "messages", "runtime"))
    return {**parts, "other": rest, "total": total}


def _host(plan: Plan) -> RenderableType:
    host = plan.host
    each = f"{host.ranks} rank{'s' if host.ranks > 1 else ''}"
    lines = []
    if host.computing:
        lines.append(f"{size_text(host.computing)}  {each} that compute on the CPU")
    if host.offloaded:
        lines.append(f"{size_text(host.offloaded)}  offloaded by {each}")
    if host.files:
        fewer = f"; {host.fewest_files} when memory is short" if host.fewest_files < host.files else ""
        of = f"{host.files} × {size_text(host.state)} for {each}{fewer}"
        fewer += "; with checkpoint.memory_tier: false none, and a failure resumes from the store"
        lines.append(f"{size_text(host.snapshots)}  snapshots (checkpoint.memory_tier): {of}")
    else:
        lines.append(f"{size_text(host.saving)}  buffer of a save")
    have = f", {size_text(host.available)} of {host.node} are free" if host.available else ""
    lines.append(f"{size_text(host.total)}  together{have}")
    text = Lines("\n".join(lines))
    return Group(text, Text(problem, "red")) if (problem := host.problem()) else text


def _unit(plan: Plan) -> tuple[int, str]:
    """Returns the largest unit in which the largest total of the memory table is at least 1."""
    largest = max(memory.total for memory in plan.memory)
    return next(((1024**power, unit) for power, unit in _UNITS if largest >= 1024**power), (1, "bytes"))


def _links(plan: Plan) -> RenderableType:
    crossing = [boundary for boundary in plan.boundaries if boundary.crosses_ranks]
    if not crossing:
        return Text("no messages between pipeline ranks")
    columns = ("per microbatch, each way", "per step, both ways")
    table = Table("", *columns, right=columns, rule=True)
    places = [(f"pp{boundary.from_rank} – pp{boundary.to_rank}", boundary) for boundary in crossing]
    sizes = {(boundary.bytes_per_microbatch, boundary.bytes_per_step) for boundary in crossing}
    if len(places) > 4 and len(sizes) == 1:
        places = [(f"each of {places[0][0]} … {places[-1][0]}", crossing[0])]
    for place, boundary in places:
        table.add_row(place, size_text(boundary.bytes_per_microbatch), size_text(boundary.bytes_per_step))
    if plan.link_gbps is None or plan.link_s_per_microbatch is None:
        return Group(table, Text("add --link-gbps X to see the time this takes", style="dim"))
    return Group(table, Text(f"at {plan.link_gbps:g} Gbit/s: {seconds_text(plan.link_s_per_microbatch)} per message"))


def _sums(sums: ReplicaSums) -> str:
    """Describes the sums of gradients over replicas, in both kinds."""
    if sums.kind == "outer":
        each, step = size_text(sums.outer_bytes), size_text(sums.outer_bytes // sums.every_steps)
        took = f"{seconds_text(sums.seconds)}, of which steps wait {seconds_text(sums.exposed_s)} each"
        every = f"every {sums.every_steps} steps" + (f" in {sums.fragments} fragments" if sums.fragments > 1 else "")
        return f"outer steps: {each} per rank {every}, {step} per step, in {took}"
    exact, int8 = size_text(sums.exact_bytes), size_text(sums.int8_bytes)
    sent = f"exact, {exact} (int8: {int8})" if sums.kind == "exact" else f"int8, {int8} (exact: {exact})"
    share = f"{sums.hidden_s / sums.seconds:.0%} beside the backwards" if sums.seconds else "at no cost"
    return f"sums over replicas: {sent} per rank and step, {share}, {seconds_text(sums.exposed_s)} after them"


def _predictions(predictions: Sequence[Forecast], lookahead: int) -> RenderableType:
    if not predictions:
        return Text("none for this job")
    table = Table.grid(padding=(0, 2))
    for column in range(4):
        table.add_column(justify="right" if column in (1, 2) else "left")
    shared = [text for text in predictions[0].assumptions if all(text in other.assumptions for other in predictions)]
    for prediction in predictions:
        own = "; ".join(text for text in prediction.assumptions if text not in shared)
        speed = f"{count_text(prediction.tokens_per_s)} tokens/s"
        table.add_row(prediction.device, seconds_text(prediction.step_s), speed, Text(own, style="dim"))
    parts: list[RenderableType] = [table]
    for prediction in predictions:
        lead = f"{prediction.device}: " if len(predictions) > 1 else ""
        parts.append(Text(f"{lead}{prediction.bottleneck}"))
        if prediction.lookahead:
            parts.append(Text(f"{lead}with lookahead {prediction.lookahead}"))
        if prediction.replica_sums is not None:
            parts.append(Text(f"{lead}{_sums(prediction.replica_sums)}"))
        need, have = size_text(prediction.peak_memory), size_text(prediction.device_memory)
        if prediction.lookahead != lookahead:
            need += f" (the table, with lookahead {lookahead}, less)"
        if prediction.peak_memory <= prediction.device_memory:
            parts.append(Text(f"{lead}a rank needs {need} of the {have} of a {prediction.device}"))
        elif prediction.device_memory:
            parts.append(Text(f"{lead}does not fit: a rank needs {need}, a {prediction.device} has {have}", "red"))
            parts.append(Text(f"{lead}what would: the same command with --fit"))
        for text, gain in prediction.advice:
            parts.append(Text(f"{lead}would save {gain:.0%}: {text}", style="dim"))
    parts.append(Text(f"assumptions: {'; '.join(shared)}", style="dim"))
    return Group(*parts)


def search_view(result: SearchResult, job: Job) -> RenderableType:
    """Shows the best candidates of a search with their settings."""
    table = Table("", "step", "tokens/s", "memory", "settings", rule=True)
    for place, one in enumerate(result.best, start=1):
        cast = one.forecast
        settings = " ".join(one.settings()) or "the job unchanged"
        costs = seconds_text(cast.step_s), count_text(cast.tokens_per_s), size_text(cast.peak_memory)
        table.add_row(str(place), *costs, Lines(settings))
    best = result.best[0]
    summary = (
        f"{result.tried} forecasts; left out: {result.refused} that cannot run, {result.too_large} that do not fit"
    )
    if result.out_of_time:
        summary += "; stopped before all were tried (raise --search-time)"
    words = " ".join(f"--set {shell_word(setting)}" for setting in best.settings())
    parts: list[RenderableType] = [
        Text.assemble((job.name, "bold cyan"), "  the same batch on other meshes and schedules, fastest first"),
        Text(""),
        table,
        Text(""),
        Text(summary, style="dim"),
        Text(f"assumptions: {'; '.join(best.forecast.assumptions)}", style="dim"),
        Text(f"bottleneck of the best: {best.forecast.bottleneck}"),
    ]
    if words:
        parts.append(Text(f"to use it: raypp submit JOB {words}"))
    return Group(*parts)


def count_text(count: float) -> str:
    """Formats a number with three digits: 1.81 M, 11.4 k, 8."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{three_digits(count / limit)} {unit}"
    return f"{count:.0f}"


_STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "rank": "bold"}


def schedule_picture(ranks: Mapping[int, Sequence[Slot]], width: int) -> Text:
    pieces = ((text, _STYLES.get(kind, "dim")) for text, kind in drawn(ranks, width))
    return Lines.assemble(*pieces, no_wrap=True)
