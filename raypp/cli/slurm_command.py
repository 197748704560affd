"""`raypp slurm`: trains a job on the nodes of a Slurm allocation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from raypp.api.checked_job import load_checked_job
from raypp.cli.job_argument import job_argument
from raypp.cli.output import echo
from raypp.clusters.slurm import Allocation, SlurmCluster, slurm_cluster
from raypp.control.client import device_for
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, JobError, Problem, ResourcesError
from raypp.spec.job import Job
from raypp.storage import open_store

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
        what = f"there is no {job} on {allocation.nodes[0]}, seen from {Path.cwd()}"
        raise JobError(
            Problem(str(job), what, "keep the job file in a folder that all nodes share, and give its path from there")
        )
    file = load_checked_job(job, overrides)
    _check_size(file.job, allocation)
    resume = resume or (allocation.restarts > 0 and _exists(file.job))
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
    """Checks that the allocation has room for the mesh, before anything starts.

    Raises:
        ResourcesError: It has not; names what it has, and a mesh that fits.
    """
    try:
        device_for(job, allocation.resources())
    except ResourcesError as error:
        where = f"Slurm job {allocation.job_id}"
        raise ResourcesError(
            Problem(f"{where}, {problem.key}" if problem.key else where, problem.what, problem.fix)
            for problem in error.problems
        ) from None


def _exists(job: Job) -> bool:
    """Whether the run began before the job was requeued."""
    return open_store(job.checkpoint.url).head(f"{job.name}/spec.json") is not None


def _follow(cluster: SlurmCluster, words: Sequence[str], run: str, signals: list[int]) -> tuple[int, int]:
    """Submits the job and follows the run. After a signal it saves and stops the run.

    Returns:
        The exit code, and the signal; 0 if the run ended by itself.
    """
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
