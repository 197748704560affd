"""`raypp submit | save | stop`: start a run and control it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import raypp
from raypp.api.checked_job import load_checked_job
from raypp.api.find_run import Records
from raypp.api.run import Run, end_in_words
from raypp.api.submission import JobWatch, prepare, start
from raypp.checkpoint.run_spec import read_end
from raypp.cli.live import LiveView, summary_view
from raypp.cli.options import job_argument
from raypp.cli.output import echo, echo_json, say
from raypp.cli.render import one_line
from raypp.clusters.find import Cluster
from raypp.clusters.known_runs import RunPlace
from raypp.errors import EXIT_INTERRUPTED
from raypp.observe.reader import RunReader
from raypp.records import RunState
from raypp.storage import StoreError
from raypp.untrusted.text import shell_word

_JSON_KEYS = ("run", "state", "step", "loss", "tokens_per_s", "restarts", "checkpoint")


@click.command("submit")
@job_argument
@click.option(
    "--address",
    metavar="A",
    help="URL of the cluster's dashboard, http://host:8265.  [default: RAYPP_ADDRESS, then the embedded cluster]",
)
@click.option("--detach", is_flag=True, help="Return once the cluster has accepted the run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--dry-run", is_flag=True, help="Check everything, including the store and the cluster. Start nothing.")
@click.option("--resume", is_flag=True, help="Resume the run of this name from its newest checkpoint.")
def submit_command(
    job: Path, overrides: tuple[str, ...], address: str | None, detach: bool, as_json: bool, dry_run: bool, resume: bool
) -> None:
    """Check JOB, submit it to the cluster, and follow the run to its end.

    The run continues after Ctrl-C. The exit code is that of the run: 0 if it succeeded, 1 if it
    failed.
    """
    prepared = prepare(load_checked_job(job, overrides), address, resume, say)
    file, store, cluster = prepared.file, prepared.store, prepared.cluster
    if dry_run:
        echo(f"{file.job.name}: the job, the store and the cluster are fine; nothing was started", err=as_json)
        echo(f"  {_sides(prepared.versions)}", err=as_json)
        if as_json:
            _print_json({"run": file.job.name})
        return
    view = LiveView()
    if resume:
        view.skip_earlier_records(RunReader(store, file.job.name))
    try:
        place = start(prepared, say)
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            echo(err=True)
            echo(note, err=True)
        raise
    echo(
        f"{place.name}: accepted by {cluster.address} as Ray job {place.submission_id}, "
        f"{file.job.mesh.world} ranks on {prepared.device}",
        err=as_json,
    )
    echo(f"  {_sides(prepared.versions)}", err=as_json)
    if detach:
        _print_follow_commands(place, as_json)
        if as_json:
            _print_json({"run": place.name, "state": str(RunState.PENDING)})
        return
    raise SystemExit(_follow(place, RunReader(store, place.name), cluster, view, as_json))


@click.command("save")
@click.argument("run")
def save_command(run: str) -> None:
    """Save a checkpoint of RUN now. Returns when it is committed."""
    active = Run.find(run)
    saved = active.save(_still_waiting(f"{run}: the checkpoint is not committed yet"))
    echo(f"{active.name}: step {saved['step']} is committed: {saved['what']}")


@click.command("stop")
@click.argument("run")
@click.option("--no-save", is_flag=True, help="Stop at once, without a final checkpoint.")
def stop_command(run: str, no_save: bool) -> None:
    """Stop RUN after a final checkpoint. Returns when the run has ended."""
    active = Run.find(run)
    echo(
        f"{active.name}: {end_in_words(active.stop(not no_save, _still_waiting(f'{run}: the run has not ended yet')))}"
    )


def _still_waiting(state: str) -> Callable[[], None]:
    return lambda: echo(f"{state}; still waiting (Ctrl-C ends only the waiting)", err=True)


def _sides(versions: dict[str, str]) -> str:
    """Names the cluster's versions, and the version of raypp whose code travels with the job."""
    there = ", ".join(f"{name.capitalize()} {version}" for name, version in versions.items() if version)
    return f"the cluster has {there}; the code of raypp {raypp.__version__} travels with the job"


# submit: following the run
# ----------------------------------------------------------------------------------------


def _follow(place: RunPlace, reader: RunReader, cluster: Cluster, view: LiveView, as_json: bool) -> int:
    """Shows the run until it ends. Returns the run's exit code."""
    if as_json:
        view.console.file = sys.stderr
    watch = JobWatch(cluster, place)
    try:
        try:
            view.follow(place, reader, watch.over)
            end = read_end(reader.store, place.name)
        except StoreError as error:
            echo(f"the run's job has ended, and its records cannot be read: {one_line(str(error))}", err=True)
            if as_json:
                _print_json({"run": place.name})
            return watch.driver_exit_code
        code = watch.exit_code(end, say)
        records = Records.read(place, reader)
        view.console.print(summary_view(place, records, view.console))
    except KeyboardInterrupt:
        echo(err=True)
        echo(f"{place.name} continues in the cluster", err=True)
        _print_follow_commands(place, True)
        return EXIT_INTERRUPTED
    if as_json:
        _print_json(records.status)
    return code


def _print_follow_commands(place: RunPlace, err: bool) -> None:
    name = shell_word(place.name)
    echo(f"  follow it:  raypp status {name} --watch", err=err)
    echo(f"  its output: raypp logs {name} --follow", err=err)
    echo(f"  stop it:    raypp stop {name}", err=err)


def _print_json(status: dict[str, Any]) -> None:
    echo_json({key: status.get(key) for key in _JSON_KEYS})
