"""Runs the examination of `raypp doctor` on a cluster and returns its report."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raypp.clusters.dashboard import FINAL_JOB_STATES
from raypp.clusters.find import Cluster
from raypp.control.client import answer_in, collect_secrets, collect_settings, python_of
from raypp.control.package import build_package
from raypp.doctor.driver import PROGRESS, ProbeOptions
from raypp.errors import Problem, UnreachableError

_TIMEOUT_S = 1800.0
_POLL_S = 0.5


def examine(cluster: Cluster, options: ProbeOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Examines a cluster and returns the report of `raypp.doctor.driver.Examination`.

    Args:
        cluster: The cluster to examine.
        options: What to examine.
        tell: Called with each line of progress.

    Raises:
        UnreachableError: The cluster does not answer, or stopped the examination.
    """
    if cluster.embedded is not None:
        return _by_process(cluster, options, tell)
    return _by_job(cluster, options, tell)


def _by_process(cluster: Cluster, options: ProbeOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    assert cluster.embedded is not None
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    options = replace(options, share_environment=True)
    with subprocess.Popen(
        [sys.executable, "-m", "raypp.doctor.driver", options.as_argument()],
        env=environment | cluster.embedded.ray_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            _pass_on(line, tell)
        return answer_in("".join(lines), process.stderr.read())


def _pass_on(line: str, tell: Callable[[str], None]) -> None:
    """Passes on a line of progress. The log of a Ray job also contains other lines."""
    if line.startswith(PROGRESS) and line.endswith("\n"):
        tell(line.removeprefix(PROGRESS).rstrip())


def _by_job(cluster: Cluster, options: ProbeOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    dashboard = cluster.dashboard
    name, content = build_package(None, collect_secrets())
    submission_id = dashboard.submit_job(
        {
            "entrypoint": f"{python_of(cluster)} -m raypp.doctor.driver {shlex.quote(options.as_argument())}",
            "runtime_env": {
                "working_dir": dashboard.upload_package(name, content),
                "env_vars": {**collect_settings(cluster), "PYTHONUNBUFFERED": "1"},
            },
            "metadata": {"job_name": "doctor", "raypp_command": "doctor"},
        }
    )
    end, printed = time.monotonic() + _TIMEOUT_S, 0
    try:
        while time.monotonic() < end:
            job = dashboard.job(submission_id)
            log = dashboard.job_logs(submission_id)
            lines = log.splitlines(keepends=True)
            for line in lines[printed:]:
                _pass_on(line, tell)
            printed = len(lines) if not lines or lines[-1].endswith("\n") else len(lines) - 1
            if job is None or job["status"] in FINAL_JOB_STATES:
                return answer_in(dashboard.job_logs(submission_id), str((job or {}).get("message", "")))
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        dashboard.stop_job(submission_id)
        raise
    dashboard.stop_job(submission_id)
    fault = f"the examination did not finish within {_TIMEOUT_S / 60:.0f} minutes"
    raise UnreachableError(Problem("address", fault))
