"""Arguments and options that several commands have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raypp.cli.output import echo
from raypp.control.clusters.find import Cluster, find_cluster, lend_store_settings
from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.paths import is_remote
from raypp.job.small_files import small_files

if TYPE_CHECKING:
    from raypp.tools.inference.source import Source  # NumPy, which the quick commands do not need


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--on-cluster` and `--address` to a command."""
    on_cluster = click.option(
        "--on-cluster", is_flag=True, help="Run on the cluster that submit would use: one rank per GPU, or CPU."
    )
    address = click.option("--address", metavar="A", help="Run on this cluster: its dashboard's URL, http://host:8265.")
    return on_cluster(address(command))


def chosen_cluster(on_cluster: bool, address: str | None) -> Cluster | None:
    """Returns the cluster that was asked for; None: this machine computes. RAYPP_ADDRESS alone does
    not ask for one. Raises UnreachableError: it does not answer, or there is none."""
    if not on_cluster and address is None:
        return None
    cluster = find_cluster(address)
    lend_store_settings(cluster.embedded)
    cluster.dashboard.check_versions()
    return cluster


def note_paths(cluster: Cluster, source: Source, job: Job | None = None, files: Sequence[str] = ()) -> None:
    """Says which paths every node must have, unless all ranks run on this machine. `job`: names
    data, if it reads any. `files`: other files that ranks read."""
    if cluster.embedded is not None:
        return
    named = [source.store, source.model.get("from_hf"), job.data.path if job is not None else None, *files]
    travel = [{"data": {"tokenizer": source.tokenizer}}, *([job_document(job)] if job is not None else [])]
    named += [str(path) for (_, path), files in small_files(*travel).items() if not files]
    paths = [str(path).removeprefix("file://") for path in named if path]
    here = [path for path in paths if not is_remote(path)]
    if here:
        echo(f"note: every node of the cluster must have {', '.join(dict.fromkeys(here))}", err=True)


def mesh_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--mesh pp=N`, which the command gets as `pp`, the number of pipeline ranks."""
    text = "Ranks that the layers are split over."
    return click.option(
        "--mesh", "pp", metavar="pp=N", default="pp=1", show_default=True, callback=_pipeline_ranks, help=text
    )(function)


def _pipeline_ranks(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Returns N of `pp=N`."""
    del context, parameter
    match = re.fullmatch(r"pp=([1-9][0-9]{0,4})", value.strip())
    if match is None:
        raise JobError(Problem("--mesh", f"{value!r} is not pp=N", "give the number of pipeline ranks, such as pp=4"))
    return int(match[1])


def trust_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--trust` to a command that uses a stored job."""
    return click.option(
        "--trust", is_flag=True, help="Use own code and local files that the run's job names, whoever wrote it."
    )(command)


def set_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option `--set` (as `overrides`) to a command."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace one value of the job, e.g. --set mesh.pp=4. Can be repeated.",
    )(command)


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument `JOB` (as `job`, a path) and the option `--set`."""
    return click.argument("job", type=click.Path(path_type=Path))(set_option(command))
