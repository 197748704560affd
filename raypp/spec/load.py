"""Loads a job file into a `Job`. Reports all problems at once, each with its `file:line`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raypp.errors import JobError, Problem
from raypp.spec.document import Document, KeyPath, read_document, undotted
from raypp.spec.job import Job
from raypp.spec.limits import FILE_BYTES
from raypp.spec.overrides import apply_overrides
from raypp.spec.paths import resolve_paths
from raypp.spec.pydantic_errors import problems_of, shown
from raypp.spec.type_names import section_of
from raypp.untrusted.files import read_file_or_pipe


@dataclass(frozen=True)
class JobFile:
    """A job and the file it was loaded from.

    Attributes:
        job: The job, with resolved paths.
        path: The file's path as the user gave it.
        where: The location (`job.yaml:14`, `--set a.b=c`) of every key that was given.
        remarks: What was chosen for the user, who should know it.
    """

    job: Job
    path: Path
    where: Mapping[KeyPath, str] = field(default_factory=dict, repr=False)
    remarks: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Directory in which relative paths are looked up after the current directory."""
        return self.path.absolute().parent

    def locate(self, problem: Problem) -> Problem:
        """Returns the problem with the location of its key, or of its nearest enclosing section."""
        return _locate(problem, self.where)


class IncompleteJobError(JobError):
    """A job file with errors in some of its values.

    Attributes:
        rest: The job with those values at their defaults, so that the other values can be checked
            too. None if not even that is valid.
    """

    rest: JobFile | None = None


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobFile:
    """Loads a job file.

    Args:
        path: The YAML file, or a pipe that the shell made of `<(command)`.
        overrides: `section.key=value` overrides that replace values of the file.

    Raises:
        JobError: All problems of the file and the overrides. An `IncompleteJobError` if the rest of
            the job is valid.
    """
    path = Path(path)
    document = read_document(_read(path), str(path))
    if document.problems and document.value is None:
        raise JobError(document.problems)
    if document.value is not None and not isinstance(document.value, dict):
        fix = "begin with `name: my-run`, followed by sections such as `model:`; for an example: raypp init quickstart"
        raise JobError(Problem("", f"a job must be a mapping of keys, is {shown(document.value)}", fix, f"{path}:1"))
    empty = document.value is None
    apply_overrides(document, overrides)
    if empty and not document.value and not document.problems:
        fix = "begin with `name: my-run`; `raypp explain` lists every key; for an example: raypp init quickstart"
        raise JobError(Problem("", "the file is empty", fix, f"{path}:1"))
    try:
        job = _parse(document)
    except JobError as error:
        incomplete = IncompleteJobError(error.problems)
        rest = _without(document.value, error.problems)
        if rest is not None:
            incomplete.rest = JobFile(resolve_paths(rest, path.absolute().parent), path, document.where)
        raise incomplete from error
    return JobFile(resolve_paths(job, path.absolute().parent), path, document.where)


def parse_job(mapping: Mapping[str, Any]) -> Job:
    """Makes a job from plain values, for example from `job_document`. Leaves paths as they are.

    Raises:
        JobError: All problems of the values.
    """
    return _parse(Document(dict(mapping)))


def job_file(job: Job) -> JobFile:
    """Returns a job that was made in Python as if read from a file of the working directory."""
    here = Path.cwd()
    return JobFile(resolve_paths(job, here), here / "job")


def job_document(job: Job) -> dict[str, Any]:
    """Returns the job as plain JSON values with every default written out.

    `parse_job` reads it back.
    """
    return job.model_dump(mode="json")


def _read(path: Path) -> str:
    data = read_file_or_pipe(path, FILE_BYTES, JobError)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fault = f"is not UTF-8 text (byte 0x{data[error.start]:02x})"
        raise JobError(Problem("", fault, "save the file as UTF-8", f"{path}:{line}")) from None


def _parse(document: Document) -> Job:
    """Validates a document. Raises the problems of its text and those of the models together."""
    problems, job = list(document.problems), None
    value = _without_empty_sections(document.value if document.value is not None else {}, Job)
    try:
        # Via JSON: pydantic's strict mode then still accepts a list for a tuple and 1 for 1.0, but
        # neither `true` for a number nor 2.0 or "2" for a whole number.
        job = Job.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reported = {problem.key for problem in problems}
        problems += [problem for problem in problems_of(error, value) if problem.key not in reported]
    if problems or job is None:
        raise JobError(in_order(_locate(problem, document.where) for problem in problems))
    return job


def _without(value: Any, problems: Iterable[Problem]) -> Job | None:
    """Returns the job with defaults in place of wrong values; None if it is still invalid."""
    rest = {key: dict(part) if isinstance(part, dict) else part for key, part in (value or {}).items()}
    for problem in problems:
        section, _, key = problem.key.partition(".")
        inner = rest.get(section)
        if key and isinstance(inner, dict):
            inner.pop(key.partition(".")[0], None)
        else:
            rest.pop(section, None)
    rest.setdefault("name", "unnamed")
    try:
        return Job.model_validate_json(json.dumps(_without_empty_sections(rest, Job)), strict=True)
    except ValidationError:
        return None


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


def _locate(problem: Problem, where: Mapping[KeyPath, str]) -> Problem:
    path = undotted(problem.key)
    while path and path not in where:
        path = path[:-1]
    return problem.located(where[path]) if path in where else problem


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sorts problems by line. Those of `--set` come last."""

    def line(problem: Problem) -> tuple[bool, int]:
        number = problem.where.rpartition(":")[2]
        return problem.where.startswith("--set"), int(number) if number.isdigit() else 0

    return sorted(problems, key=line)
