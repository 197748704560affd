"""`raypp data tokenize`: writes token shards. Needs no cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from raypp.cli.console import Console
from raypp.cli.job_argument import job_argument
from raypp.cli.output import echo, echo_json, echo_lines
from raypp.clusters.find import lend_store_settings
from raypp.errors import DataError, JobError
from raypp.planning.stored_bytes import size_text
from raypp.spec.checks import check_spec
from raypp.spec.load import load_job
from raypp.storage import open_for_others
from raypp.untrusted.text import shell_word

if TYPE_CHECKING:
    from raypp.data.shard_format import Manifest
    from raypp.data.shard_jobs import Output


@click.command("tokenize")
@job_argument
@click.option("--out", required=True, metavar="DIR_OR_URL", help="Folder of the token shards, or its URL in a store.")
@click.option("--processes", type=click.IntRange(1, 256), help="Processes that tokenise.  [default: one per CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tokenize_command(job: Path, overrides: tuple[str, ...], out: str, processes: int | None, as_json: bool) -> None:
    """Tokenise the data of JOB once, into shards that any run reads without copying them.

    Train on them with the `data:` section that it prints: the rows are the same. Each part of a
    mixture gets its own folder below --out. If the command is killed, run it again: it continues.
    """
    from raypp.data.shard_jobs import outputs_of, section_of_shards

    file = load_job(job, overrides)
    problems = [problem for problem in check_spec(file.job, file.directory) if problem.key.startswith("data")]
    if problems:
        raise JobError(file.locate(problem) for problem in problems)
    lend_store_settings()
    made: list[tuple[Output, str, Manifest]] = []
    for output in outputs_of(file.job):
        try:
            url, manifest = _written(output, out, processes or len(os.sched_getaffinity(0)))
        except DataError as error:
            raise DataError(file.locate(problem) for problem in error.problems) from error
        made.append((output, url, manifest))
        if not as_json:
            name = f"{output.name}: " if output.name else ""
            held = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {size_text(manifest.size)}"
            echo(f"{name}{held} in {len(manifest.shards)} shard{'s' if len(manifest.shards) != 1 else ''}")
    section = section_of_shards(file.job, {output.key: url for output, url, _ in made})
    if as_json:
        echo_json({"outputs": [_document(*one) for one in made], "data": section})
    elif [output.key for output, _, _ in made] == ["data"]:
        echo(f"  train on them: --set data.kind=tokens --set {shell_word('data.path=' + made[0][1])}")
    else:
        echo("train on them with this section:")
        echo_lines(yaml.safe_dump({"data": section}, sort_keys=False, allow_unicode=True), nl=False)


def _written(output: Output, out: str, processes: int) -> tuple[str, Manifest]:
    """Writes the shards of one source; returns their path or URL, and what they are."""
    from raypp.data.write_shards import Options, write_shards

    def say_found(shards: int) -> None:
        if shards:
            name = f"{output.name}: " if output.name else ""
            echo(f"{name}keeps {shards} finished shard{'s' if shards != 1 else ''}", err=True)

    def say_remark(remark: str) -> None:
        echo(f"note: {remark}", err=True)

    place = f"{out.rstrip('/')}/{output.name}" if output.name else out
    with open_for_others(place) as store, _progress(output.name) as (total, advance):
        told = Options(processes, total=total, progress=advance, found=say_found, remarked=say_remark)
        return store.url.removeprefix("file://"), write_shards(output.read, output.request, store, told)


def _document(output: Output, url: str, made: Manifest) -> dict[str, object]:
    facts = {"documents": made.documents, "tokens": made.tokens, "shards": len(made.shards), "bytes": made.size}
    return {"key": output.key, "out": url, **facts, "dtype": made.plan.dtype, "digest": made.digest}


@contextmanager
def _progress(name: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Shows bytes of the source, speed and time left on stderr, if it is a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"tokenising {name}".rstrip(), total=None)
        yield lambda size: progress.update(task, total=size), lambda count: progress.advance(task, count)
