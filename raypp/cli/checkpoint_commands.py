"""`raypp checkpoints`: list, verify and prune. The other subcommands are in their own files."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import click

from raypp.api.checkpoints import committed_steps, nothing_committed, open_run
from raypp.checkpoint.commit import read_commit
from raypp.checkpoint.layout import step_folder
from raypp.checkpoint.ranged_reads import verify_checkpoint
from raypp.checkpoint.retention import find_leftovers, prune, remove_leftovers
from raypp.checkpoint.run_spec import read_spec
from raypp.cli.checkpoint_hf_commands import export_command, import_command
from raypp.cli.checkpoint_look_commands import diff_command, show_command
from raypp.cli.console import Lines, Table, progress_bar, wide_console
from raypp.cli.output import echo, echo_json
from raypp.errors import EXIT_RUN_FAILED, CheckpointError, JobError, Problem
from raypp.observe.status import date_and_clock, duration, mesh_text
from raypp.storage import ObjectStore


@click.group("checkpoints")
def checkpoints_group() -> None:
    """List, show, verify, prune, compare, export and import checkpoints.

    RUN is a run's name, or URL/NAME. Append /step-N for one checkpoint.
    """


for _command in (show_command, diff_command, export_command, import_command):
    checkpoints_group.add_command(_command)


@checkpoints_group.command("list")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, oldest first.")
def list_command(run: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN.

    Shows what COMMIT records. `raypp checkpoints verify` reads the data itself.
    """
    store, name, step = open_run(run)
    rows = [_row(store, name, committed) for committed in committed_steps(store, name, step)]
    if as_json:
        echo_json(rows)
    elif not rows:
        echo(f"{name} has no committed checkpoint in {store.url}")
    else:
        console = wide_console()
        console.print(_table(rows))
        console.print(f"in {store.url}/{name}", style="dim")


@checkpoints_group.command("verify")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, oldest first.")
def verify_command(run: str, as_json: bool) -> None:
    """Read RUN's checkpoints in full and compare every byte with what was committed.

    If an object is missing, torn or corrupt, prints its name and exits with code 1.
    """
    store, name, step = open_run(run)
    steps = committed_steps(store, name, step)
    if not steps:
        raise nothing_committed(store, name)
    results: list[dict[str, Any]] = []
    for step in steps:
        size, started = _size(store, name, step), time.monotonic()
        with progress_bar(f"step {step}", size) as advance:
            problems = verify_checkpoint(store, name, step, progress=advance)
        results.append(
            {
                "step": step,
                "checkpoint": f"{store.url}/{step_folder(name, step)}",
                "ok": not problems,
                "problems": [{"object": problem.key, "problem": problem.fault} for problem in problems],
            }
        )
        if not as_json and problems:
            echo(f"step {step}: unusable", err=True)
            for problem in problems:
                echo(f"  {store.url}/{problem.key}: {problem.fault}", err=True)
        elif not as_json:
            echo(f"step {step}: intact, {size / 1e6:.1f} MB read in {time.monotonic() - started:.1f} s")
    if as_json:
        echo_json(results)
    if not all(result["ok"] for result in results):
        raise SystemExit(EXIT_RUN_FAILED)


@checkpoints_group.command("prune")
@click.argument("run")
@click.option(
    "--keep", type=click.IntRange(1), default=None, help="Checkpoints to keep.  [default: the job's checkpoint.keep]"
)
@click.option(
    "--keep-every",
    type=click.IntRange(0),
    default=None,
    metavar="N",
    help="Also keep steps that are multiples of N. 0: none.  [default: the job's checkpoint.keep_every]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune_command(run: str, keep: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints of RUN, and leftovers of saves that were never committed.

    Reads the newest checkpoint in full first. If it is damaged, nothing is removed.
    """
    store, name, step = open_run(run)
    if step is not None:
        raise JobError(Problem("RUN", "prune takes a run, not a step", f"use {store.url}/{name} with --keep"))
    steps = committed_steps(store, name, None)
    if keep is None or keep_every is None:
        keep, keep_every = _keep_of_job(store, name, keep, keep_every)
    if steps:
        with progress_bar(f"step {steps[-1]}", _size(store, name, steps[-1])) as advance:
            problems = verify_checkpoint(store, name, steps[-1], progress=advance)
        if problems:
            fault = "nothing was removed: an older checkpoint may be the last good one"
            raise CheckpointError([*problems, Problem("", fault, "run `raypp checkpoints verify`")])
    pruned = prune(store, name, keep, keep_every=keep_every, dry_run=dry_run)
    left = find_leftovers(store, name)
    left = replace(left, objects=tuple(info for info in left.objects if info.key not in pruned.objects))
    if not dry_run:
        remove_leftovers(store, name, left)
    if as_json:
        facts = {
            "steps": list(pruned.steps),
            "objects": len(pruned.objects) + len(left.objects),
            "bytes": pruned.size + left.size,
            "uploads": len(left.uploads),
            "under_way": len(left.under_way),
            "dry_run": dry_run,
        }
        echo_json(facts)
        return
    verb = "would remove" if dry_run else "removed"
    gone = ", ".join(str(gone) for gone in pruned.steps) or "none"
    kept = f"the newest {keep}" + (f" and every {keep_every}th step" if keep_every else "")
    echo(f"{verb} {len(pruned.objects)} objects, {pruned.size / 1e6:.1f} MB (steps: {gone}); kept {kept}")
    if left:
        echo(f"{verb} {left}")
    if left.under_way:
        echo(f"kept {len(left.under_way)} uploads of the newest attempt, which may still be in progress")


def _row(store: ObjectStore, name: str, step: int) -> dict[str, Any]:
    place = {"step": step, "checkpoint": f"{store.url}/{step_folder(name, step)}"}
    try:
        commit = read_commit(store, name, step)
    except CheckpointError as error:
        return {**place, "error": error.problems[0].fault}
    return {
        **place,
        "attempt": commit.attempt,
        "mesh": commit.mesh,
        "bytes": commit.size,
        "objects": len(commit.objects),
        "created": commit.created,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    numbers = ("step", "size", "objects", "attempt")
    table = Table(*numbers, "mesh", "written", right=numbers)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["step"]), "–", "–", "–", Lines(f"COMMIT {row['error']}", "red"), "")
            continue
        written = f"{date_and_clock(row['created'])} ({duration(time.time() - row['created'])} ago)"
        size = f"{row['bytes'] / 1e6:.1f} MB"
        table.add_row(str(row["step"]), size, str(row["objects"]), str(row["attempt"]), mesh_text(row["mesh"]), written)
    return table


def _size(store: ObjectStore, name: str, step: int) -> int:
    try:
        return read_commit(store, name, step).size
    except CheckpointError:
        return 0


def _keep_of_job(store: ObjectStore, name: str, keep: int | None, keep_every: int | None) -> tuple[int, int]:
    """Returns the given values, else those of the job.

    A job without keep_every keeps no extra steps.
    """
    try:
        section = read_spec(store, name).get("checkpoint") or {}
        wanted = section.get("keep") if keep is None else keep
        every = section.get("keep_every", 0) if keep_every is None else keep_every
        if type(wanted) is int and wanted > 0 and type(every) is int and every >= 0:
            return wanted, every
        raise CheckpointError("its checkpoint.keep and keep_every are not numbers")
    except CheckpointError:
        if keep is not None:
            return keep, keep_every or 0
        fault = "the store does not contain this run's job, so its checkpoint.keep is unknown"
        raise JobError(Problem("--keep", fault, "give the number to keep: --keep N")) from None
