"""`raypp checkpoints list | verify | prune`: what a run has in its store, whether it is whole, and what may go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from raypp.checkpoint.commit import list_checkpoints, read_commit
from raypp.checkpoint.layout import split_location, step_folder
from raypp.checkpoint.retention import prune
from raypp.checkpoint.runs import read_spec
from raypp.checkpoint.verify import verify_checkpoint
from raypp.cli.render import date_and_clock, duration, mesh_text
from raypp.control import runs
from raypp.errors import EXIT_RUN_FAILED, CheckpointError, JobError, Problem
from raypp.storage import ObjectStore, open_store


@click.group("checkpoints")
def checkpoints_group() -> None:
    """List, verify and prune checkpoints.

    RUN is a run's name, or URL/NAME; for one checkpoint add /step-N.
    """


@checkpoints_group.command("list")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, oldest first.")
def list_command(run: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN.

    Only what COMMIT says is shown; `raypp checkpoints verify` reads the bytes.
    """
    store, name, step = _open(run)
    rows = [_row(store, name, found) for found in _steps(store, name, step)]
    if as_json:
        click.echo(json.dumps(rows))
    elif not rows:
        click.echo(f"{name} has no committed checkpoint in {store.url}")
    else:
        console = _console()
        console.print(_table(rows))
        console.print(f"in {store.url}/{name}", style="dim", highlight=False, markup=False)


@checkpoints_group.command("verify")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, oldest first.")
def verify_command(run: str, as_json: bool) -> None:
    """Read every byte of RUN's checkpoints again and compare it with what was committed.

    Exit code 1, and the name of each object, when one is missing, torn or corrupt.
    """
    store, name, step = _open(run)
    steps = _steps(store, name, step)
    if not steps:
        raise CheckpointError(Problem(f"{store.url}/{name}", "has no committed checkpoint", "has the run saved yet?"))
    bad = False
    results: list[dict[str, Any]] = []
    for found in steps:
        with _progress(found, _size(store, name, found)) as advance:
            started = time.monotonic()
            problems = verify_checkpoint(store, name, found, progress=advance)
        bad = bad or bool(problems)
        results.append(
            {
                "step": found,
                "checkpoint": f"{store.url}/{step_folder(name, found)}",
                "ok": not problems,
                "problems": [{"object": problem.key, "problem": problem.what} for problem in problems],
            }
        )
        if not as_json:
            _tell(store, name, found, problems, time.monotonic() - started)
    if as_json:
        click.echo(json.dumps(results))
    if bad:
        raise SystemExit(EXIT_RUN_FAILED)


@checkpoints_group.command("prune")
@click.argument("run")
@click.option(
    "--keep", type=click.IntRange(1), default=None, help="How many to keep.  [default: the job's checkpoint.keep]"
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def prune_command(run: str, keep: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove all but the newest checkpoints of RUN, and leftovers of saves that never were committed.

    The newest one is read in full first; when it is not whole, nothing is removed.
    """
    store, name, step = _open(run)
    if step is not None:
        raise JobError(Problem("RUN", "prune takes a run, not a step", f"use {store.url}/{name} with --keep"))
    steps = _steps(store, name, None)
    keep = keep or _keep_of_job(store, name)
    if steps:
        with _progress(steps[-1], _size(store, name, steps[-1])) as advance:
            problems = verify_checkpoint(store, name, steps[-1], progress=advance)
        if problems:
            advice = Problem(
                "", "nothing was removed: older checkpoints may be all there is", "look at `raypp checkpoints verify`"
            )
            raise CheckpointError([*problems, advice])
    pruned = prune(store, name, keep, dry_run=dry_run)
    if as_json:
        facts = {"steps": list(pruned.steps), "objects": len(pruned.objects), "bytes": pruned.size, "dry_run": dry_run}
        click.echo(json.dumps(facts))
        return
    verb = "would remove" if dry_run else "removed"
    gone = ", ".join(str(gone) for gone in pruned.steps) or "none"
    click.echo(
        f"{verb} {len(pruned.objects)} objects, {pruned.size / 1e6:.1f} MB (steps: {gone}); kept the newest {keep}"
    )


def _open(argument: str) -> tuple[ObjectStore, str, int | None]:
    """The store, the run and the step that an argument means.

    Raises:
        JobError: There is nothing of such a run.
    """
    url, name, step = split_location(argument)
    place = runs.locate_run(name if url is None else f"{url}/{name}")
    store = open_store(place.url)
    if next(store.list(f"{name}/"), None) is None:
        raise JobError(
            Problem("RUN", f"there is no run {name!r} below {store.url}", "is it the checkpoint.url of the job?")
        )
    return store, name, step


def _steps(store: ObjectStore, name: str, only: int | None) -> list[int]:
    steps = [checkpoint.step for checkpoint in list_checkpoints(store, name)]
    if only is None:
        return steps
    if only not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise JobError(Problem("RUN", f"step {only} of {name} is not committed", f"committed steps: {there}"))
    return [only]


def _row(store: ObjectStore, name: str, step: int) -> dict[str, Any]:
    place = {"step": step, "checkpoint": f"{store.url}/{step_folder(name, step)}"}
    try:
        commit = read_commit(store, name, step)
    except CheckpointError as error:
        return {**place, "error": error.problems[0].what}
    return {
        **place,
        "attempt": commit.attempt,
        "mesh": commit.mesh,
        "bytes": commit.size,
        "objects": len(commit.objects),
        "created": commit.created,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("step", "size", "objects", "attempt"):
        table.add_column(heading, justify="right")
    for heading in ("mesh", "written"):
        table.add_column(heading)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["step"]), "–", "–", "–", f"[red]COMMIT {row['error']}[/red]", "")
            continue
        written = f"{date_and_clock(row['created'])} ({duration(time.time() - row['created'])} ago)"
        size = f"{row['bytes'] / 1e6:.1f} MB"
        table.add_row(str(row["step"]), size, str(row["objects"]), str(row["attempt"]), mesh_text(row["mesh"]), written)
    return table


def _tell(store: ObjectStore, name: str, step: int, problems: list[Problem], seconds: float) -> None:
    if not problems:
        size = _size(store, name, step)
        click.echo(f"step {step}: whole, {size / 1e6:.1f} MB re-read in {seconds:.1f} s")
        return
    click.echo(f"step {step}: cannot be used", err=True)
    for problem in problems:
        click.echo(f"  {store.url}/{problem.key}: {problem.what}", err=True)


def _size(store: ObjectStore, name: str, step: int) -> int:
    try:
        return read_commit(store, name, step).size
    except CheckpointError:
        return 0


def _keep_of_job(store: ObjectStore, name: str) -> int:
    try:
        return int(read_spec(store, name)["checkpoint"]["keep"])
    except (CheckpointError, LookupError, TypeError, ValueError):
        raise JobError(
            Problem(
                "--keep",
                "the job of this run is not in its store, so its checkpoint.keep is not known",
                "say how many to keep: --keep N",
            )
        ) from None


@contextmanager
def _progress(step: int, size: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes are read (on a terminal only)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"step {step}", total=size)
        yield lambda count: progress.advance(task, count)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)
