"""Applies `--set a.b=c`: values of the job file given on the command line."""

from __future__ import annotations

from collections.abc import Iterable

from raypp.errors import Problem
from raypp.spec.document import Document, KeyPath, dotted, read_document
from raypp.spec.pydantic_errors import shown


def apply_overrides(document: Document, overrides: Iterable[str]) -> None:
    """Sets `key=value` overrides in a document, in order. The last one wins.

    Values are YAML (`2`, `[3, 5]`, `{kind: sgd}`; an empty value is null). Errors in an override
    are added to the document's problems with the location `--set key=value`. Unknown keys are found
    later, by the models.
    """
    for setting in overrides:
        problem = _apply(document, setting)
        if problem is not None:
            document.problems.append(problem.located(f"--set {setting}"))


def _apply(document: Document, setting: str) -> Problem | None:
    key, equals, text = setting.partition("=")
    path: KeyPath = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        return Problem("", "is not an override", "write --set section.key=value, for example --set mesh.pp=2")
    where = f"--set {setting}"
    value = read_document(text, where, numbered=False)
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
    section[path[-1]] = value.value
    for known in [known for known in document.where if known[: len(path)] == path]:
        del document.where[known]
    document.where[path] = where
    return None
