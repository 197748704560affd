"""Loads a job file into a `Job`. Reports all problems at once, each with its `file:line`."""

import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.document import Document, read_document
from raypp.job.job import Job
from raypp.job.limits import FILE_BYTES
from raypp.job.load import validated
from raypp.job.paths import resolve_paths
from raypp.job.section import KeyPath, dotted, undotted
from raypp.job.wrong_values import shown
from raypp.registry import is_module
from raypp.untrusted.files import read_file_or_pipe
from raypp.untrusted.text import visible

_LONGEST_PLACE = 80
_OWN = re.compile(r"\b([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]")
_beside: set[str] = set()
_TEXT_BEGINS = ("*", "%", "@", "`")


@dataclass(frozen=True)
class JobFile:
    """A job and the file it was loaded from. `job`: the job, with resolved paths. `path`: the
    file's path as the user gave it. `where`: the location (`job.yaml:14`, `--set a.b=c`) of every
    key that was given. `remarks`: what was chosen for the user, who should know it."""

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
    """A job file with errors in some of its values. `rest`: the job with those values at their
    defaults, so that the other values can be checked too. None if not even that is valid."""

    rest: JobFile | None = None


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobFile:
    """Loads a job file. `overrides`: `section.key=value`, instead of values of the file. Raises
    JobError: all problems of both; `IncompleteJobError` if the rest is valid."""
    path = Path(path)
    document = read_document(_read(path), str(path))
    if document.problems and document.value is None:
        raise JobError(document.problems)
    if document.value is not None and not isinstance(document.value, dict):
        fix = "begin with `name: my-run`, followed by sections such as `model:`; for an example: raypp init quickstart"
        raise JobError(Problem("", f"a job must be a mapping of keys, is {shown(document.value)}", fix, f"{path}:1"))
    if isinstance(document.value, dict) and document.value.get("include") is not None:
        _include(document, path)
    empty = document.value is None
    apply_overrides(document, overrides)
    if empty and not document.value and not document.problems:
        fix = "begin with `name: my-run`; `raypp explain` lists every key; for an example: raypp init quickstart"
        raise JobError(Problem("", "the file is empty", fix, f"{path}:1"))
    _look_beside(document.value, path.absolute().parent)
    try:
        job = _parse(document)
    except JobError as error:
        incomplete = IncompleteJobError(error.problems)
        rest = _without(document.value, error.problems)
        if rest is not None:
            incomplete.rest = JobFile(resolve_paths(rest, path.absolute().parent), path, document.where)
        raise incomplete from error
    return JobFile(resolve_paths(job, path.absolute().parent), path, document.where)


def _include(document: Document, path: Path) -> None:
    """Gives a document the values of the file that it includes, where it has none of its own.
    Raises JobError: the file cannot be read, or includes another."""
    name, where = document.value.pop("include"), document.where.pop(("include",))
    if not isinstance(name, str) or not name:
        fix = "for example `include: base.yaml`"
        raise JobError(Problem("include", f"must be the path of a job file, is {shown(name)}", fix, where))
    source = path.parent / name
    if source.absolute().resolve() == path.absolute().resolve():
        raise JobError(Problem("include", f"{visible(name)} is this file: a circle", "name another file", where))
    try:
        base = read_document(_read(source), str(source))
    except JobError as error:
        found = (replace(one, key="include", fault=f"{visible(source)} {one.fault}") for one in error.problems)
        raise JobError([one.located(where) for one in found]) from None
    if not isinstance(base.value, dict):
        fault = f"a job must be a mapping of keys, is {shown(base.value)}"
        raise JobError(base.problems or Problem("", fault, "write sections such as `model:`", f"{source}:1"))
    if base.value.get("include") is not None:
        circle = path.absolute().resolve() == (source.parent / str(base.value["include"])).absolute().resolve()
        fault = f"{path} includes this file{': a circle' if circle else ', which may include none'}"
        raise JobError(Problem("include", fault, "write the values into one of the two", base.where[("include",)]))
    _merge(base.value, document.value, (), base.where, document.where)
    document.value, document.problems = base.value, [*base.problems, *document.problems]
    document.where = {**base.where, (): document.where[()]}


def _merge(
    into: dict[str, Any], value: Mapping[str, Any], at: KeyPath, where: dict[KeyPath, str], own: Mapping[KeyPath, str]
) -> None:
    """Replaces values, and their locations, by those of another mapping; sections are merged."""
    for key, new in value.items():
        path, old = (*at, key), into.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            where[path] = own[path]
            _merge(old, new, path, where, own)
            continue
        for known in list(_paths(old, path)):
            where.pop(known, None)
        into[key] = new
        where |= {inner: own[inner] for inner in _paths(new, path) if inner in own}


def _look_beside(value: Any, directory: Path) -> None:
    """Finds modules that a job names also beside it, and no longer beside the job loaded before."""
    sys.path[:] = [place for place in sys.path if place not in _beside]
    _beside.clear()
    importlib.invalidate_caches()
    tops = {match[1] for match in _OWN.finditer(json.dumps(value, default=str))}
    if any(not is_module(top) and PathFinder.find_spec(top, [str(directory)]) for top in tops):
        _beside.add(str(directory))
        sys.path.append(str(directory))


def job_file(job: Job) -> JobFile:
    """Returns a job that was made in Python as if read from a file of the working directory."""
    here = Path.cwd()
    return JobFile(resolve_paths(job, here), here / "job")


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
    job, found = validated(document.value if document.value is not None else {})
    reported = {problem.key for problem in document.problems}
    problems = [*document.problems, *(problem for problem in found if problem.key not in reported)]
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
    return validated(rest)[0]


def _locate(problem: Problem, where: Mapping[KeyPath, str]) -> Problem:
    path = undotted(problem.key)
    while path and path not in where:
        path = path[:-1]
    return problem.located(where[path]) if path in where else problem


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sorts problems by line. Those of `--set` come last."""

    def line(problem: Problem) -> tuple[bool, str, int]:
        file, _, number = problem.where.rpartition(":")
        is_set = problem.where.startswith("--set")
        return is_set, "" if is_set else file, int(number) if number.isdigit() else 0

    return sorted(problems, key=line)


def apply_overrides(document: Document, overrides: Iterable[str]) -> None:
    """Sets `key=value` overrides in a document, in order. The last one wins.

    Values are YAML (`2`, `[3, 5]`, `{kind: sgd}`; an empty value is null), except for those that
    begin with `*`, `%`, `@` or a backtick, which are text such as `*.txt`: YAML has no use for
    these characters in one value. Errors in an override are added to the document's problems with
    the location `--set key=value`. Unknown keys are found later, by the models.
    """
    for setting in overrides:
        problem = _apply(document, setting)
        if problem is not None:
            document.problems.append(problem.located(_place(setting)))


def _place(setting: str) -> str:
    """Returns the location of an override, truncated if long."""
    return f"--set {setting if len(setting) <= _LONGEST_PLACE else setting[:_LONGEST_PLACE] + '…'}"


def _apply(document: Document, setting: str) -> Problem | None:
    key, equals, text = setting.partition("=")
    path: KeyPath = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        return Problem("", "is not an override", "write --set section.key=value, for example --set mesh.pp=2")
    where = _place(setting)
    plain = text.lstrip().startswith(_TEXT_BEGINS)
    value = Document(text.strip()) if plain else read_document(text, where, numbered=False)
    if value.problems:
        document.problems += value.problems
        return None
    if document.value is None:
        document.value = {}
    section = document.value
    for depth, part in enumerate(path[:-1]):
        if not isinstance(section, dict):
            break
        if section.get(part) is None:
            section[part] = {}
            document.where.setdefault(path[: depth + 1], where)
        section = section[part]
    else:
        depth = len(path) - 1
    if not isinstance(section, dict):
        parent = dotted(path[:depth]) or "the job"
        return Problem("", f"{parent} is {shown(section)}, not a section of keys", f"set the whole of {parent}")
    for known in list(_paths(section.get(path[-1]), path)):
        document.where.pop(known, None)
    section[path[-1]] = value.value
    document.where[path] = where
    return None


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in inner:
        yield from _paths(item, (*path, part))
