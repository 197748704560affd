"""`raypp parity`: checks whether the mesh changes the numbers."""

from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding

from raypp.api.checked_job import load_checked_job
from raypp.api.torch_process import ask
from raypp.cli.console import Console, Table, Text
from raypp.cli.options import job_argument
from raypp.cli.output import echo_json
from raypp.environment import usable_cores
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, Problem, ResourcesError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.planning.geometry import Mesh

_SHOWN = 8


@click.command("parity")
@job_argument
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Number of steps to compare.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Largest relative error that passes.  [default: 1e-5; 0.05 with bf16]",
)
@click.option(
    "--max-ranks",
    type=click.IntRange(1),
    metavar="N",
    help="Refuse meshes with more ranks than this.  [default: twice this machine's cores]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def parity_command(
    job: Path, overrides: tuple[str, ...], steps: int, tolerance: float | None, max_ranks: int | None, as_json: bool
) -> int:
    """Run a few steps of JOB on its mesh and in one process, and show where they differ.

    Both run on this machine's CPU, with one process per rank. This needs no cluster and no store,
    but the model must fit into memory. Compares losses, gradient norms, every gradient, and the
    weights after the last step. Exits with code 1 if the largest relative error exceeds the
    tolerance.
    """
    file = load_checked_job(job, overrides)
    console = Console()
    world = Mesh.of(file.job.mesh).world
    _check_world(world, max_ranks)
    with Console(stderr=True).status(f"{steps} steps on {world} ranks, then in one process …"):
        request = {"job": job_document(file.job), "steps": steps, "tolerance": tolerance}
        answer = ask("raypp.tools.parity", request, "the comparison")
    if as_json:
        echo_json(answer)
    else:
        console.print(parity_view(file.job, answer))
    return EXIT_OK if answer["passed"] else EXIT_RUN_FAILED


def _check_world(world: int, max_ranks: int | None) -> None:
    """Refuses too many ranks: each is a process on this machine that imports torch."""
    cores = usable_cores()
    most = 2 * cores if max_ranks is None else max_ranks
    if world > most:
        why = "--max-ranks" if max_ranks is not None else f"twice its {cores} core{'' if cores == 1 else 's'}"
        fault = f"{world} ranks would start {world} processes on this machine; the limit is {most} ({why})"
        fix = f"compare a smaller mesh, for example with --set mesh.fsdp=1, or raise the limit: --max-ranks {world}"
        raise ResourcesError(Problem("mesh", fault, fix))


def parity_view(job: Job, answer: dict[str, Any]) -> RenderableType:
    """Shows the comparison: each step, the parameters that differ most, the result."""
    mesh = " × ".join(f"{name} {size}" for name, size in job.mesh.axes.items() if size > 1) or "one rank"
    title = Text.assemble((job.name, "bold cyan"), f"  {mesh}, {job.pipeline.schedule}, against one process")
    parts: list[RenderableType] = [title, Text(""), Padding(_steps(answer), (0, 0, 0, 2), expand=False)]
    if answer["parameters"]:
        parts += [Text(""), Padding(_parameters(answer), (0, 0, 0, 2), expand=False)]
    return Group(*parts, Text(""), _verdict(answer))


def _steps(answer: dict[str, Any]) -> Table:
    numbers = ("loss", "grad norm", "gradients that differ", "by")
    table = Table("step", "", *numbers, right=numbers, rule=True)
    for row in answer["steps"]:
        differing = f"{row['differing']} of {row['gradients']}"
        worst = _error(row["worst"])
        table.add_row(
            str(row["step"]), "mesh", *(f"{row[key][0]:.9g}" for key in ("loss", "grad_norm")), differing, worst
        )
        same = [Text("same", "green") if a == b else Text(f"{b:.9g}") for a, b in (row["loss"], row["grad_norm"])]
        table.add_row("", "one", *same, "", "")
    return table


def _parameters(answer: dict[str, Any]) -> RenderableType:
    table = Table("parameter", "gradient", "weight", right=("gradient", "weight"), rule=True)
    for parameter in answer["parameters"][:_SHOWN]:
        name = Text(parameter["name"], overflow="ellipsis", no_wrap=True)
        table.add_row(name, _error(parameter["gradient_error"]), _error(parameter["weight_error"]))
    left = len(answer["parameters"]) - _SHOWN
    return Group(table, Text(f"and {left} more that differ less", "dim")) if left > 0 else table


def _verdict(answer: dict[str, Any]) -> Text:
    if answer["bitwise"]:
        count = answer["compared"]
        return Text.assemble(("bitwise", "bold green"), f" equal: losses, norms and all {count} parameters")
    word, style = ("within", "bold green") if answer["passed"] else ("outside", "bold red")
    error, limit = answer["max_error"], answer["tolerance"]
    return Text.assemble((word, style), f" the tolerance: largest relative error {error:.2e}, {limit:.0e} allowed")


def _error(value: float) -> Text:
    return Text("none", "green") if value == 0 else Text(f"{value:.1e}")
