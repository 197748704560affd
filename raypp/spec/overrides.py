"""Applies `--set a.b=c`: values of the job file given on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from raypp.errors import Problem
from raypp.spec.document import Document, KeyPath, dotted, read_document
from raypp.spec.limits import DEPTH
from raypp.spec.pydantic_errors import shown

_LONGEST_PLACE = 80
_TEXT_BEGINS = ("*", "%", "@", "`")


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
    if len(path) > DEPTH:
        return Problem("", f"names a key {len(path):,} levels deep; there are at most {DEPTH}", "name a key of the job")
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
    """Yields the key path of a value and those of all values in it."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in inner:
        yield from _paths(item, (*path, part))
