"""Finds the checkpoint that an argument refers to. Output helpers of the `checkpoints` commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from raypp.checkpoint.commit import Commit, list_checkpoints
from raypp.checkpoint.layout import split_location
from raypp.checkpoint.saved_tensors import SavedTensors
from raypp.cli.console import Console
from raypp.cli.output import echo_lines
from raypp.clusters import known_runs
from raypp.errors import CheckpointError, JobError, Problem
from raypp.inference.source import newest_checkpoint
from raypp.storage import ObjectStore, open_store
from raypp.untrusted.text import visible

_SHOWN = 5


def open_run(argument: str) -> tuple[ObjectStore, str, int | None]:
    """Returns the store, the run and the step of `RUN`, `URL/NAME` or `URL/NAME/step-N`.

    Raises:
        JobError: The store contains nothing of that run.
    """
    url, name, step = split_location(argument)
    place = known_runs.locate_run(name if url is None else f"{url}/{name}")
    store = open_store(place.url)
    if next(store.list(f"{name}/"), None) is None:
        raise JobError(
            Problem("RUN", f"there is no run {name!r} below {store.url}", "use the checkpoint.url of the run's job")
        )
    return store, name, step


def committed_steps(store: ObjectStore, name: str, only: int | None) -> list[int]:
    """Returns the committed steps of a run, or only the requested one.

    Raises:
        JobError: The requested step is not committed.
    """
    steps = [checkpoint.step for checkpoint in list_checkpoints(store, name)]
    if only is None:
        return steps
    if only not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise JobError(Problem("RUN", f"step {only} of {name} is not committed", f"committed steps: {there}"))
    return [only]


def open_checkpoint(argument: str) -> tuple[ObjectStore, Commit, SavedTensors]:
    """Returns the checkpoint that an argument refers to.

    Without a step, the newest one of which COMMIT and all headers can be read; says which ones
    cannot.

    Raises:
        JobError: There is no such run, or no such step.
        CheckpointError: The run has no checkpoint, or none can be read.
    """
    store, name, step = open_run(argument)
    commit, tensors, unusable = newest_checkpoint(store, name, step)
    if unusable:
        told = "\n".join(f"  {visible(f'{problem.key}: {problem.what}')}" for problem in unusable[:_SHOWN])
        echo_lines(f"step {commit.step} is used, because newer checkpoints cannot be read:\n{told}", err=True)
    return store, commit, tensors


def nothing_committed(store: ObjectStore, name: str) -> CheckpointError:
    place = f"{store.url}/{name}"
    return CheckpointError(Problem(place, "has no committed checkpoint", "wait for the run's first save"))


@contextmanager
def progress_bar(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """Shows progress in bytes on stderr, if it is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=size)
        yield lambda count: progress.advance(task, count)
