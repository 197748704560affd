"""`raypp data tokenize`: writes token shards. Needs no cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from raypp.cli.checkpoint_place import size_text
from raypp.cli.console import Console
from raypp.cli.load_job import job_argument
from raypp.cli.output import echo, echo_json
from raypp.clusters.find import lend_store_settings
from raypp.errors import JobError
from raypp.spec.checks import check_spec
from raypp.spec.load import load_job
from raypp.storage import open_store


@click.command("tokenize")
@job_argument
@click.option("--out", required=True, metavar="DIR_OR_S3", help="Folder or s3://bucket/prefix of the token shards.")
@click.option("--processes", type=click.IntRange(1, 256), help="Processes that tokenise.  [default: one per CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tokenize_command(job: Path, overrides: tuple[str, ...], out: str, processes: int | None, as_json: bool) -> None:
    """Tokenise the data of JOB once, into shards that any run reads without copying them.

    Train on them with `kind: tokens` and `path: DIR_OR_S3`: the rows are the same. If the command
    is killed, run it again: it goes on.
    """
    from raypp.data.sources import source_request
    from raypp.data.write_shards import Options, write_shards

    file = load_job(job, overrides)
    problems = [problem for problem in check_spec(file.job, file.directory) if problem.key.startswith("data")]
    if problems:
        raise JobError(file.locate(problem) for problem in problems)
    lend_store_settings()
    read, request = source_request(file.job)
    store = open_store(out)
    with _progress() as (total, advance):
        workers = processes or len(os.sched_getaffinity(0))
        told = Options(workers, total=total, progress=advance, found=_say_found)
        made = write_shards(read, request, store, told)
    size = made.tokens * {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}[made.plan.dtype]
    if as_json:
        facts = {"documents": made.documents, "tokens": made.tokens, "shards": len(made.shards), "bytes": size}
        echo_json({"out": store.url, **facts, "dtype": made.plan.dtype, "digest": made.digest})
        return
    echo(f"{made.documents:,} documents, {made.tokens:,} tokens, {size_text(size)} in {len(made.shards)} shards")
    echo(f"  train on them: --set data.kind=tokens --set data.path={store.url.removeprefix('file://')}")


def _say_found(shards: int) -> None:
    if shards:
        echo(f"{shards} shards are there already; goes on after them", err=True)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Shows bytes of the source, speed and time left on stderr, if it is a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)
        yield lambda size: progress.update(task, total=size), lambda count: progress.advance(task, count)
