"""Uses a trained model on a cluster: submits a Ray job, and reads what it prints."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from annotated_types import Ge, Le
from typing_extensions import TypedDict

from raypp.clusters.dashboard import FINAL_JOB_STATES, DashboardError, NodeResources
from raypp.clusters.find import Cluster
from raypp.control.client import collect_secrets, collect_settings, device_for, python_of
from raypp.control.package import INFERENCE_FILE, build_package
from raypp.errors import Problem, RayppError, ResourcesError, RunFailedError, UnreachableError
from raypp.inference.processes import first_error
from raypp.inference.source import Source
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.untrusted.documents import Bounds, Count, parse_as

_POLL_S, _LONGEST_POLL_S = 0.1, 2.0
_SHARE = 0.1
"""Share of the time spent fetching the log, which the dashboard always sends whole."""
_LOOK_EVERY_S = 1.0
_STOP_S = 15.0
_FREED_S = 15.0
_SHOWN = 2000
_LINE = Bounds(size=1 << 20)


class _Progress(TypedDict):
    done: Count
    total: Count
    unit: str


class _Error(TypedDict):
    problems: list[tuple[str, str, str]]
    exit_code: Annotated[int, Ge(1), Le(125)]
    peer: bool


class _Report(TypedDict, total=False):
    """What `inference.on_seat` reports, and the answers."""

    token: tuple[Count, Count, str | None]
    progress: _Progress
    error: _Error
    done: Count
    loss: float
    perplexity: float | None
    tokens: Count
    bytes_per_token: float | None
    seconds: float
    tasks: dict[str, dict[str, int | float]]


def use_on_cluster(
    cluster: Cluster, what: str, source: Source, job: Job, request: Mapping[str, Any]
) -> Generator[dict[str, Any]]:
    """Yields what rank 0 reports, as it comes. The answer is the last.

    A caller that closes the iterator ends the job on the cluster.

    Args:
        what: `generate` or `eval`, for names.
        source: The model; every rank reads its part of the weights itself.
        job: Its mesh and `resources` say how many ranks run on which devices.
        request: More of what `inference.on_seat.use_model` takes.

    Raises:
        UnreachableError: The cluster does not answer, or refuses the job.
        ResourcesError: There are fewer free devices than ranks.
        RayppError: A rank failed; with its exit code.
    """
    device = _device(cluster, job)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    name = f"{what}-{source.run or 'model'}-{stamp}"
    whole = {"name": name, "device": device, "source": asdict(source), "job": job_document(job), **request}
    package = build_package(
        None,
        collect_secrets(here=cluster.embedded is not None),
        [(INFERENCE_FILE, json.dumps(whole).encode())],
    )
    try:
        submission_id = cluster.dashboard.submit_job(
            {
                "entrypoint": f"{python_of(cluster)} -m raypp.control.inference_driver",
                "submission_id": f"raypp-{name}",
                "runtime_env": {
                    "working_dir": cluster.dashboard.upload_package(*package),
                    "env_vars": {**collect_settings(cluster), "PYTHONUNBUFFERED": "1"},
                },
                "metadata": {"job_name": f"{what} {source.place}", "raypp_command": what},
            }
        )
    except DashboardError as error:
        raise UnreachableError(Problem("address", f"the cluster refused the job: {error}")) from None
    over = False
    try:
        for report in _reports(cluster, submission_id):
            if "error" in report:
                over = True
                raise first_error({0: report["error"]})
            yield report
        over = True
    finally:
        _end(cluster, submission_id, stop=not over)


def _device(cluster: Cluster, job: Job) -> str:
    """Returns the device of the ranks, when enough are free.

    For some seconds, the dashboard still counts the devices of a job that has ended as used.
    """
    end = time.monotonic() + _FREED_S
    while True:
        nodes = cluster.dashboard.nodes()
        try:
            return device_for(job, nodes, embedded=cluster.embedded is not None, training=False)
        except ResourcesError as error:
            if time.monotonic() > end or not _fits_when_idle(job, nodes):
                raise ResourcesError(
                    replace(problem, key="--mesh", fix=problem.fix.replace("--set mesh.pp=", "--mesh pp="))
                    for problem in error.problems
                ) from None
        time.sleep(1.0)


def _fits_when_idle(job: Job, nodes: Sequence[NodeResources]) -> bool:
    idle = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
    try:
        device_for(job, idle, training=False)
    except ResourcesError:
        return False
    return True


def _reports(cluster: Cluster, submission_id: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a job's log until the job has ended or reported an error.

    Raises:
        RunFailedError: It ended without success.
    """
    dashboard = cluster.dashboard
    read, looked = 0, 0.0
    job: Mapping[str, Any] | None = {}
    while True:
        ended = job is None or job.get("status") in FINAL_JOB_STATES
        began = time.monotonic()
        log = dashboard.job_logs(submission_id) if job is not None else ""
        took = time.monotonic() - began
        end = len(log) if ended else log.rfind("\n") + 1
        yield from reports_in(log[read:end])
        read = max(read, end)
        if ended:
            break
        time.sleep(min(_LONGEST_POLL_S, max(_POLL_S, took / _SHARE)))
        if time.monotonic() - looked > _LOOK_EVERY_S:
            job, looked = dashboard.job(submission_id), time.monotonic()
    if job is None or job.get("status") != "SUCCEEDED":
        state = str((job or {}).get("message") or "it no longer exists")
        tail = log.strip()[-_SHOWN:]
        raise RunFailedError(f"the Ray job {submission_id} ended early: {state}" + (f"\n{tail}" if tail else ""))


def reports_in(log: str) -> Iterator[dict[str, Any]]:
    """Yields the reports among the lines of a job's log. Other lines are those of libraries."""
    for line in log.split("\n"):
        if line.startswith("{"):
            with contextlib.suppress(RunFailedError):
                data = line.encode("utf-8", "replace")
                if report := parse_as(_Report, data, "the job's log", _LINE, RunFailedError, unknown="ignore"):
                    yield dict(report)


def _end(cluster: Cluster, submission_id: str, *, stop: bool) -> None:
    """Waits until a job has ended. Stops it first if `stop` is set."""
    with contextlib.suppress(RayppError):
        if stop:
            cluster.dashboard.stop_job(submission_id)
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end:
            job = cluster.dashboard.job(submission_id)
            if job is None or job["status"] in FINAL_JOB_STATES:
                return
            time.sleep(0.1)
