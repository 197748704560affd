"""Makes a job from plain values, and back."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.job.section import section_of


def parse_job(mapping: Mapping[str, Any]) -> Job:
    """Makes a job of plain values, paths as they are. Raises JobError: all problems."""
    job, problems = validated(mapping)
    if job is None:
        raise JobError(problems)
    return job


def job_document(job: Job) -> dict[str, Any]:
    """Returns the job as plain JSON values with every default, for `parse_job`."""
    return job.model_dump(mode="json")


def validated(mapping: Any) -> tuple[Job | None, list[Problem]]:
    """Makes a job from plain values; returns None, and all problems of the values, if it cannot."""
    value = _without_empty_sections(mapping, Job)
    try:
        # Via JSON: pydantic's strict mode then still accepts a list for a tuple and 1 for 1.0, but
        # neither `true` for a number nor 2.0 or "2" for a whole number.
        return Job.model_validate_json(json.dumps(value), strict=True), []
    except ValidationError as error:
        from raypp.job.wrong_values import problems_of  # of a wrong job alone

        return None, problems_of(error, value)


def _without_empty_sections(value: Any, section: Any) -> Any:
    """Gives an empty section (`mesh:` with all keys commented out) its defaults."""
    if not isinstance(value, dict):
        return value
    result = {}
    for key, inner in value.items():
        info = section.model_fields.get(key)
        inner_section = section_of(info.annotation) if info else None
        if inner_section is not None:
            inner = _without_empty_sections(inner, inner_section)
            if inner is None and info.default is not None:
                inner = {}
        result[key] = inner
    return result
