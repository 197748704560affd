"""`raypp local` controls the embedded cluster; `raypp slurm` trains on the nodes of a Slurm job."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from raypp.api.checked_job import load_checked_job
from raypp.api.run_control import RunControl, end_in_words
from raypp.cli.options import job_argument
from raypp.cli.output import confirmed, echo, echo_json
from raypp.cli.render import one_line
from raypp.control.client import device_for
from raypp.control.clusters import known_runs, local, local_servers
from raypp.control.clusters.find import find_cluster
from raypp.control.clusters.slurm import Allocation, SlurmCluster, slurm_cluster
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_UNREACHABLE, JobError, Problem, ResourcesError
from raypp.job.job import Job
from raypp.storage import open_store


@click.group("local")
def local_group() -> None:
    """Control a cluster on this machine: a Ray head, an S3 server and, where it is installed,
    Prometheus, on the loopback interface."""


@local_group.command()
@click.option("--cpus", type=click.IntRange(1), default=None, help="CPU slots of Ray.  [default: max(8, cores)]")
def up(cpus: int | None) -> None:
    """Start the cluster, unless it is already running."""
    left = local.remains()
    dead = left.dead() if left else ()
    cluster, started = local_servers.up(cpus)
    echo("the embedded cluster is up" if started else "the embedded cluster was already up")
    for name in dead:
        echo(f"its {name} had ended and was started again; the other server, with what it held, went on")
    _describe(cluster)
    if not started and cpus not in (None, cluster.num_cpus):
        echo(f"--cpus {cpus} has no effect on a running cluster; run `raypp local down` first", err=True)


@local_group.command()
@click.option("--delete-data", is_flag=True, help="Also delete all data in its S3 server and Prometheus.")
@click.option("--yes", is_flag=True, help="Save and stop active runs without asking.")
def down(delete_data: bool, yes: bool) -> None:
    """Stop the cluster. Other Ray clusters are not affected.

    Runs that are active are saved and stopped first, so that --resume continues them.
    """
    _stop_runs(yes)
    ended = local_servers.down(delete_data=delete_data)
    echo("the embedded cluster is down" if ended else "no embedded cluster was running")


def _stop_runs(yes: bool) -> None:
    """Saves and stops the active runs of the embedded cluster; asks before, unless `yes`."""
    cluster = local.remains()
    cluster = cluster if cluster and cluster.ray.find() else None
    active = [RunControl(place) for place in known_runs.active_runs(find_cluster(cluster.dashboard))] if cluster else []
    for run in active:
        status = run.status()
        at = f"{status['state']}, step {status['step']} of {status['steps']}, newest checkpoint {status['checkpoint']}"
        echo(f"this saves and stops {run.name}: {at}", err=True)
    if active and not yes and not confirmed("Save and stop, then end the cluster?"):
        raise click.Abort
    for run in active:
        try:
            echo(f"{run.name}: {end_in_words(run.stop(on_wait=_too_long))}")
        except Exception as error:  # noqa: BLE001 - the cluster is ended all the same
            echo(f"{run.name} was not stopped in order: {one_line(str(error))}", err=True)


def _too_long() -> None:
    raise TimeoutError("it has not ended within a minute")


@local_group.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Show whether the cluster is running, and its addresses.  Exits with code 3 if it is not."""
    cluster = local.find()
    if as_json:
        shown: dict[str, object] = {"up": cluster is not None}
        if cluster is not None:
            shown |= {"dashboard": cluster.dashboard, "s3": cluster.s3.endpoint, "cpus": cluster.num_cpus}
            shown["prometheus"] = cluster.prometheus_url() if cluster.has_prometheus() else None
        echo_json(shown)
    elif cluster is None and (left := local.remains()) is not None:
        (dead,) = left.dead() or ("server that was asked",)
        echo(f"the {dead} of the embedded cluster has ended; `raypp local up` starts it beside the other server")
    elif cluster is None:
        echo("no embedded cluster is running; start it with `raypp local up`")
    else:
        echo("the embedded cluster is up")
        _describe(cluster)
    if cluster is None:
        raise SystemExit(EXIT_UNREACHABLE)


def _describe(cluster: local.LocalCluster) -> None:
    echo(f"  Ray dashboard  {cluster.dashboard}  (log in with the token in {cluster.token_path})")
    echo(
        f"  S3 server      {cluster.s3.endpoint}  bucket {local_servers.BUCKET}, keys in {cluster.s3.directory}/s3.json"
    )
    echo(f"  Prometheus     {_prometheus(cluster)}")
    echo(f"  CPU slots      {cluster.num_cpus}  (logical; ranks can outnumber cores and then share them)")


def _prometheus(cluster: local.LocalCluster) -> str:
    if cluster.has_prometheus():
        return f"{cluster.prometheus_url()}  scrapes Ray's metrics and those of the runs"
    if local_servers.find_prometheus() is None:
        return "not installed; install `prometheus` (Debian, Homebrew), then run `raypp local up` again"
    return f"not running; see {local.directory() / 'prometheus' / 'prometheus.log'}, then run `raypp local up`"


_ASK_S = 1.0
_SAVE_AND_REQUEUE = (signal.SIGUSR1, signal.SIGUSR2)
"""What `#SBATCH --signal` sends some minutes before the time limit."""


@click.command("slurm")
@job_argument
@click.option("--resume", is_flag=True, help="Resume the run of this name. A requeued job does so by itself.")
def slurm_command(job: Path, overrides: tuple[str, ...], resume: bool) -> None:
    """Start Ray on this Slurm allocation, train JOB, and exit with the run's exit code.

    cluster/slurm/raypp.sbatch calls it. SIGUSR1, which Slurm sends before the time limit, saves,
    stops the run and requeues the job; the requeued job resumes it. SIGTERM saves and stops.
    """
    allocation = Allocation.of(os.environ)
    if not job.is_file():
        fault = f"there is no {job} on {allocation.nodes[0]}, seen from {Path.cwd()}"
        fix = "keep the job file in a folder that all nodes share, and give its path from there"
        raise JobError(Problem(str(job), fault, fix))
    file = load_checked_job(job, overrides)
    _check_size(file.job, allocation)
    if allocation.restarts:  # the run may have begun before the job was requeued
        resume = resume or open_store(file.job.checkpoint.url).head(f"{file.job.name}/spec.json") is not None
    signals: list[int] = []
    for number in (*_SAVE_AND_REQUEUE, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: signals.append(number))
    count = len(allocation.nodes)
    echo(
        f"Slurm job {allocation.job_id}: starting Ray on {count} node{'s' * (count > 1)}, {', '.join(allocation.nodes)}"
    )
    with slurm_cluster(allocation) as cluster:
        echo(f"the dashboard is at {cluster.address}; to use the cluster from another shell:")
        for name, value in cluster.environment().items():
            echo(f"  export {name}={value}")
        words = [str(job), *(word for change in overrides for word in ("--set", change)), *(["--resume"] * resume)]
        code, signalled = _follow(cluster, words, file.job.name, signals)
    # Ray has ended on all nodes and its files are gone: requeuing ends this process.
    if signalled in _SAVE_AND_REQUEUE and code == EXIT_OK:
        code = _requeue(allocation)
    raise SystemExit(code)


def _check_size(job: Job, allocation: Allocation) -> None:
    """Checks that the allocation has room for the mesh, before anything starts."""
    try:
        device_for(job, allocation.resources())
    except ResourcesError as error:
        where = f"Slurm job {allocation.job_id}"
        raise ResourcesError(
            Problem(f"{where}, {problem.key}" if problem.key else where, problem.fault, problem.fix)
            for problem in error.problems
        ) from None


def _follow(cluster: SlurmCluster, words: Sequence[str], run: str, signals: list[int]) -> tuple[int, int]:
    """Submits the job and follows the run. After a signal it saves and stops the run. Returns the
    exit code, and the signal; 0 if the run ended by itself."""
    environment = os.environ | cluster.environment()
    raypp = [sys.executable, "-m", "raypp"]
    submit = subprocess.Popen([*raypp, "submit", *words], env=environment, start_new_session=True)
    while not signals:
        try:
            return submit.wait(_ASK_S), 0
        except subprocess.TimeoutExpired:
            pass
        for name, code in cluster.ended_nodes().items():
            echo(f"node {name} has left the cluster (exit code {code})", err=True)
    echo(f"{signal.Signals(signals[0]).name}: saving and stopping the run", err=True)
    stopped = subprocess.run([*raypp, "stop", run], env=environment, check=False).returncode
    # A run that has ended by itself meanwhile cannot be stopped.
    return submit.wait(), 0 if stopped else signals[0]


def _requeue(allocation: Allocation) -> int:
    if reason := allocation.requeue():
        echo(f"Slurm does not requeue the job: {reason}; submit it again, with --resume", err=True)
        return EXIT_RUN_FAILED
    echo(f"Slurm job {allocation.job_id} is requeued, and will resume the run", err=True)
    return EXIT_OK
