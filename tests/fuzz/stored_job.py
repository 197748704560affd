"""Stored jobs."""

import json
from typing import Any

from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.planning.check import check_plan
from tests.fuzz import target


def _checked(job: Job) -> None:
    check_plan(job)
    if parse_job(job_document(job)) != job:
        raise AssertionError("a job differs from what is stored of it")


@target(json.dumps(job_document(parse_job({"name": "a", "mesh": {"pp": 2}}))).encode())
def stored_job(data: bytes) -> None:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return  # refused by what reads the file
    if isinstance(found, dict):
        _checked(parse_job(found))
