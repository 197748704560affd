"""`raypp plan`: shows what a job will do and cost, and what would be faster."""

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from raypp.api.checked_job import count_own_model, grounds_of, load_checked_job
from raypp.api.torch_process import ask
from raypp.cli.console import Console
from raypp.cli.options import job_argument
from raypp.cli.output import echo_json, echo_lines
from raypp.cli.plan_view import count_text, plan_view, search_view
from raypp.errors import EXIT_RESOURCES, JobError, size_text
from raypp.job.job import Job
from raypp.job.job_file import JobFile
from raypp.job.limits import RANKS, RATE
from raypp.job.load import job_document
from raypp.planning.costs import DEVICES, Costs, Device
from raypp.planning.decide import settle
from raypp.planning.decision import RankMemory
from raypp.planning.fit_search import Fitting, Proposal, changes_that_fit, set_words
from raypp.planning.measured_costs import write_costs
from raypp.planning.plan import Grounds, Plan, make_plan
from raypp.planning.search import search as search_meshes
from raypp.planning.sizes import sizes_remark
from raypp.state.run_records.status import seconds_text


class _Finite(click.FloatRange):
    """A range of numbers that refuses NaN; click's own range accepts it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


_INDENTED = 4096
"""Plans of more ranks are one line of JSON: indenting takes seconds."""
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("plan")
@job_argument
@click.option(
    "--link-gbps",
    type=_Finite(1e-6, RATE),
    metavar="X",
    help="Speed of the link of a node, in Gbit/s, shared by its devices: eight cards of 400 are 3200.",
)
@click.option(
    "--inside-gbps",
    type=_Finite(1e-6, RATE),
    metavar="X",
    help="Speed between two devices of a node, in Gbit/s each way. Default: that of --device (NVLink, PCIe).",
)
@click.option("--links", type=_FILE, metavar="FILE", help="Nodes and links measured by `raypp doctor --out FILE`.")
@click.option("--device", metavar="NAME", help="Device to predict for, e.g. rtx4090.")
@click.option("--per-node", type=click.IntRange(1, RANKS), metavar="N", help="Devices per node.")
@click.option("--costs", type=_FILE, metavar="FILE", help="Costs of the model's parts, measured by --measure.")
@click.option(
    "--measure", type=_FILE, metavar="FILE", help="Measure the costs on a device of this machine, save and use them."
)
@click.option(
    "--search", is_flag=True, help="Rank meshes, cuts, schedules and microbatch counts for the same batch by step time."
)
@click.option(
    "--exact", is_flag=True, help="Play a step of each pipeline rank on tensors without memory, and show its peak."
)
@click.option("--fit", is_flag=True, help="Find what must change for the job to fit into --device, fastest first.")
@click.option(
    "--search-time",
    type=_Finite(1, 86_400),
    default=60,
    show_default=True,
    metavar="S",
    help="Most seconds for --search or --fit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    job: Path,
    overrides: tuple[str, ...],
    costs: Path | None,
    measure: Path | None,
    search: bool,
    exact: bool,
    fit: bool,
    search_time: float,
    as_json: bool,
    **machines: Any,
) -> None:
    """Show what a job will do and cost, without a cluster.

    Shows the mesh and the place of every rank, the cut of the layers, a picture of the schedule,
    memory per rank, the bubble, bytes over the links, the step time and its bottleneck. Reports all
    mistakes in the job file at once.
    """
    if fit and (costs or measure or search):
        fault = "--search" if search else "--costs" if costs else "--measure"
        fix = f"leave out {fault}: --fit compares precisions and microbatches with the data sheet of --device"
        raise JobError(f"--fit and {fault} do not go together", fix)
    if exact and (fit or search):
        fault = "--fit" if fit else "--search"
        raise JobError(f"--exact and {fault} do not go together", "play the job with the settings that it finds")
    if costs is not None and measure is not None:
        raise JobError("--measure writes the file that --costs reads", "use only one of them")
    file = load_checked_job(job, overrides)
    count_own_model(file.job)
    if measure is not None:
        _measure(file.job, measure)
    grounds = grounds_of(file.job, costs=costs or measure, **machines)
    console = Console()
    if fit:
        _fit(file.job, grounds, search_time, as_json)
        return
    if search:
        _search(file.job, grounds, search_time, as_json, console)
        return
    plan = make_plan(file.job, grounds)
    played = _play(file, plan) if exact else []
    if as_json:
        document = plan.as_dict() | ({"played": played} if exact else {})
        echo_json(document, indent=2 if plan.world <= _INDENTED else None)
        return
    console.print(plan_view(file.job, plan, console.width, played))


def _play(file: JobFile, plan: Plan) -> list[dict[str, Any]]:
    """Plays a step of one rank of each pipeline rank, once where the plan is the same. Returns for
    each: `planned`, the bytes of its tensors by plan; `played`, those of the step at its peak;
    `at`, the action of the peak; `rest`, the plan's other bytes; `total`, `played` and `rest`."""
    if plan.memory_device != "cuda":
        fix = "leave out --exact, or plan for a GPU: --set resources.device=cuda"
        raise JobError("--exact plays the step of a GPU, and this plan is for a CPU", fix)
    ranks = {planned.coordinates.pp: planned.rank for planned in reversed(plan.ranks)}
    answers: dict[RankMemory, dict[str, Any]] = {}
    with Console(stderr=True).status("playing …") as status:
        for pp, memory in enumerate(plan.memory):
            if memory in answers:
                continue
            step = f"playing a step of pp{pp}, {len(answers) + 1} of {len(set(plan.memory))}"
            decided = settle(file.job, plan.decision.facts).with_reduction(plan.reduce_gradients)
            request = {"job": job_document(decided), "rank": ranks[pp]}

            def show(report: Mapping[str, Any], step: str = step) -> None:
                status.update(f"{step}: {report['action']} …")

            try:
                answers[memory] = ask("raypp.tools.played_step", request, f"the played step of pp{pp}", show)
            except JobError as error:
                raise JobError(map(file.locate, error.problems)) from error
    return [
        {
            "pp": pp,
            "planned": memory.total - memory.runtime,
            "played": answers[memory]["peak"],
            "at": answers[memory]["at"],
            "rest": memory.runtime,
            "total": answers[memory]["peak"] + memory.runtime,
        }
        for pp, memory in enumerate(plan.memory)
    ]


def _measure(job: Job, path: Path) -> None:
    """Measures costs in a process that may import torch, and writes them."""
    request = {"job": job_document(job), "device": job.resources.device}
    console = Console(stderr=True)
    with console.status("measuring the parts of the model on this machine …"):
        answer = ask("raypp.tools.model_costs", request, "the measurement")
    measured = TypeAdapter(Costs).validate_python(answer)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        write_costs(path, measured, job, answer["device"], answer["precision"], when)
    except OSError as error:
        raise JobError(f"--measure {path}: {error.strerror}", "name a file that can be written") from error


def _fit(job: Job, grounds: Grounds, patience_s: float, as_json: bool) -> None:
    device = grounds.devices_for(job)[-1]
    job = settle(job, device.facts)
    if not device.memory:
        names = ", ".join(name for name, known in DEVICES.items() if known.memory)
        raise JobError("--fit needs a device whose memory is known", f"add --device with one of {names}")
    with Console(stderr=True).status("trying meshes and memory-saving options …"):
        fitting = changes_that_fit(job, grounds.machines_for(job), device, patience_s=patience_s)
    if as_json:
        echo_json(fit_document(fitting), indent=2)
    else:
        echo_lines("\n".join(_lines(fitting, job, device)))
    if fitting.now is None and not fitting.same:
        raise SystemExit(EXIT_RESOURCES)


def _search(job: Job, grounds: Grounds, patience_s: float, as_json: bool, console: Console) -> None:
    device = grounds.devices_for(job)[-1]
    job = settle(job, device.facts)
    costs = grounds.costs or device
    with Console(stderr=True).status("trying meshes, cuts and schedules …"):
        result = search_meshes(
            job, grounds.machines_for(job), costs, device_memory=device.memory, kind=device.kind, patience_s=patience_s
        )
    remark = sizes_remark(job.model)
    if as_json:
        rows = [
            {
                "settings": one.settings(),
                "step_s": one.forecast.step_s,
                "tokens_per_s": one.forecast.tokens_per_s,
                "peak_memory": one.forecast.peak_memory,
                "bottleneck": one.forecast.bottleneck,
            }
            for one in result.best
        ]
        counts = {"tried": result.tried, "refused": result.refused, "too_large": result.too_large}
        remarks = {"remarks": [remark]} if remark else {}
        echo_json({"best": rows, **counts, "out_of_time": result.out_of_time, **remarks}, indent=2)
        return
    console.print(search_view(result, job))
    if remark:
        console.print()
        console.print(remark)


def fit_document(fitting: Fitting) -> dict[str, Any]:
    return {
        "fits": fitting.now is not None,
        "need": fitting.need,
        "device_memory": fitting.capacity,
        "same": [_row(one) for one in fitting.same],
        "apart": [_row(one) for one in fitting.apart],
        "nearest": _row(fitting.nearest) if fitting.nearest else None,
        "more_devices": _row(fitting.more) if fitting.more else None,
        "tried": fitting.tried,
        "out_of_time": fitting.out_of_time,
    }


def _row(one: Proposal) -> dict[str, Any]:
    return {
        "settings": one.settings(),
        "devices": one.job.mesh.world,
        "step_s": one.forecast.step_s,
        "tokens_per_s": one.forecast.tokens_per_s,
        "peak_memory": one.peak,
        "costs": list(one.costs),
    }


def _lines(fitting: Fitting, job: Job, device: Device) -> Iterator[str]:
    world = job.mesh.world
    where = f"{world} × {device.name} ({size_text(device.memory)} each)"
    if fitting.now is not None:
        yield f"{job.name} already fits on {where}: a rank needs {size_text(fitting.need)}, {_speed(fitting.now)}"
        yield _assumptions(fitting.now)
        return
    yield f"{job.name} does not fit on {where}: a rank needs {size_text(fitting.need)}"
    if fitting.same:
        yield "\nfits with the same model, data and batch, fastest first:"
        yield from _listed(fitting.same)
    else:
        yield "\nnothing that was tried fits with the same model, data and batch"
        if fitting.nearest is not None:
            yield "the nearest:"
            yield from _listed([fitting.nearest])
    if fitting.more is not None:
        yield f"\nfits on {fitting.more.job.mesh.world} devices:"
        yield from _listed([fitting.more])
    if fitting.apart:
        yield "\nfits with another training:"
        yield from _listed(fitting.apart)
    summary = f"\n{fitting.tried} combinations planned"
    yield summary + ("; stopped before all were tried (raise --search-time)" if fitting.out_of_time else "")
    shown = [*fitting.same, *fitting.apart, *(one for one in (fitting.more, fitting.nearest) if one is not None)]
    if shown:
        yield _assumptions(shown[0])


def _listed(proposals: Iterable[Proposal]) -> Iterator[str]:
    for place, one in enumerate(proposals, start=1):
        costs = f"; {', '.join(one.costs)}" if one.costs else ""
        yield f"  {place}. {_speed(one)}, {size_text(one.peak)} per rank{costs}"
        yield f"     {set_words(one) or '(unchanged)'}"


def _speed(one: Proposal) -> str:
    return f"{seconds_text(one.forecast.step_s)} per step, {count_text(one.forecast.tokens_per_s)} tokens/s"


def _assumptions(one: Proposal) -> str:
    return f"assumptions: {'; '.join(one.forecast.assumptions)}"
