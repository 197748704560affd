"""`raypp.load_job`, `raypp.submit` and `raypp.run`: what a script or a notebook calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.api.checked_job import checked, load_checked_job
from raypp.api.run import Run
from raypp.api.submission import prepare, start
from raypp.spec.job import Job
from raypp.spec.job_file import job_file

_log = logging.getLogger("raypp")


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Loads and checks a job file.

    Args:
        path: The YAML file.
        overrides: Values by key, such as `{"train.steps": 200}`, which replace those of the file.

    Raises:
        JobError: All problems, each with its location.
    """
    words = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    return load_checked_job(path, words).job


def submit(job: Job, *, address: str | None = None, resume: bool = False, wait: bool = False) -> Run:
    """Checks a job, submits it to a cluster, and returns the run.

    What `raypp submit` says on the way, the logger `raypp` gets as warnings.

    Args:
        job: From `load_job`, or made in Python; relative paths are those of the working directory.
        address: URL of the cluster's dashboard; None: RAYPP_ADDRESS, then the embedded cluster.
        resume: Resume the run of this name from its newest checkpoint.
        wait: Return when the run has ended.

    Raises:
        JobError: The job cannot run there, or its name is taken.
        UnreachableError: The cluster or the store does not answer.
        ResourcesError: The cluster has not enough devices.
        RunFailedError: With `wait`, the run has failed.
    """
    submitted = Run(start(prepare(checked(job_file(job)), address, resume, _log.warning), _log.warning))
    if wait:
        submitted.wait()
    return submitted


def run(name: str) -> Run:
    """Returns the run of a name, or of URL/NAME.

    Raises:
        JobError: There is no such run. The message suggests close names.
    """
    return Run.find(name)
