"""Describes each wrong value of a job as a problem that a user can fix. Finds the job's sections by
key path, and says their types in words."""

from __future__ import annotations

import difflib
import json
import math
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raypp.errors import Problem
from raypp.job import limits
from raypp.job.job import Job
from raypp.job.known_families import model_options
from raypp.job.other_names import translated, translated_section
from raypp.job.section import KeyPath, Section, dotted, section_of

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def problems_of(error: ValidationError, document: Any) -> list[Problem]:
    """Returns one problem per wrong key, in the order of the document's sections. Merges the errors
    of a union."""
    problems: dict[KeyPath, Problem] = {}
    for details in error.errors(include_url=False):
        if details["loc"][-1:] == ("bool",) and isinstance(details["input"], dict):
            continue  # of a union with a section, whose own errors describe the mistake
        path = key_path(tuple(details["loc"]), document, missing=details["type"] == "missing")
        limit = details["ctx"]["le"] if details["type"] == "less_than_equal" else None
        beyond = limit is not None and is_limit(limit)
        if path in problems and not beyond:
            continue
        if beyond:
            problems[path] = _too_large(path, details["input"], limit)
        elif details["type"] == "extra_forbidden":
            problems[path] = unknown_key(path, document)
        elif details["type"] == "missing" and isinstance(path[-1], str):
            problems[path] = Problem(dotted(path), "is missing", f"add `{path[-1]}:` ({expected_at(path, document)})")
        elif details["type"] == "missing":
            problems[path[:-1]] = wrong_value(path[:-1], _value(path[:-1], document), document)
        else:
            problems[path] = wrong_value(path, details["input"], document)
    return list(problems.values())


def _too_large(path: KeyPath, value: Any, most: Any) -> Problem:
    words = f"{most:,}" if isinstance(most, int) else f"{most:g}"
    return Problem(dotted(path), f"must be at most {words}, is {shown(value)}", f"use a number up to {words}")


def key_path(location: KeyPath, document: Any, *, missing: bool = False) -> KeyPath:
    """Returns an error's location as a key path, without the names of union members."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        inside = part in document if isinstance(document, dict) else False
        if isinstance(document, list) and isinstance(part, int):
            inside = part < len(document)
        if inside:
            document = document[part]
        elif not (missing and last):
            continue
        path.append(part)
    return tuple(path)


def unknown_key(path: KeyPath, document: Any) -> Problem:
    """Describes an unknown key. Suggests the closest key, the section that has it, or lists the
    known keys."""
    name, section = str(path[-1]) if path else "", section_at(path[:-1], document)
    known = list(section.model_fields) if section else []
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    homes = [f"{key}.{name}" if key else name for key, other in all_sections() if name in other.model_fields]
    if theirs := translated(name):
        fix = theirs
    elif close:
        fix = f"did you mean {close[0]}?"
    elif len(homes) in (1, 2):
        fix = f"did you mean {' or '.join(homes)}?"
    elif theirs := translated_section(_value(path, document)):
        fix = theirs
    else:
        fix = f"remove it; {dotted(path[:-1]) or 'a job'} has: {', '.join(known)}"
    return Problem(dotted(path), "unknown key", fix)


def wrong_value(path: KeyPath, value: Any, document: Any) -> Problem:
    """Describes a value of the wrong type or out of range."""
    fault = f"must be {expected_at(path, document)}, is {shown(value)}"
    return Problem(dotted(path), fault, _fix(path, value, document))


def shown(value: Any) -> str:
    """Formats a value as it would appear in the file, truncated if long."""
    if value is None:
        return "null"
    if isinstance(value, str | float):
        text = repr(value)
    elif isinstance(value, dict):
        text = "a section of keys"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _fix(path: KeyPath, value: Any, document: Any) -> str:
    expected, name = expected_at(path, document), str(path[-1]) if path else ""
    info = field_at(path, document)
    listed = info or (field_at(path[:-1], document) if path and isinstance(path[-1], int) else None)
    literals = literals_of(listed.annotation) if listed else []
    if literals and isinstance(value, str):
        close = difflib.get_close_matches(value.lower(), literals, n=1, cutoff=0.5)
        if close:
            return f"did you mean {close[0]}?"
    if "whole number" in expected and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if "number" in expected and isinstance(value, str) and _number(value):
        return f"write it without quotes: {value.strip()}"
    if expected.startswith("text") and isinstance(value, bool | int | float):
        quoted = f"'{json.dumps(value)}'"
        return f'put it in quotes: {quoted} (in a shell: --set "{dotted(path)}={quoted}")'
    if expected == "true or false":
        return "write true" if str(value).lower() in ("yes", "on", "1") else "write true or false"
    if path == ("name",):
        slug = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40]
        return f"for example `name: {slug or 'my-run'}`"
    if literals and "number" not in expected:
        return f"use {' or '.join(literals)}" if len(literals) < 3 else f"use one of {', '.join(literals)}"
    if info is not None and (section := section_of(info.annotation)) is not None:
        return f"put its keys below `{name}:`, indented ({', '.join(list(section.model_fields)[:4])} …)"
    default = info.get_default(call_default_factory=True) if info else PydanticUndefined
    if default is not PydanticUndefined and default is not None:
        return f"for example `{name}: {default if isinstance(default, str) else json.dumps(default)}`"
    sections = (path[:depth] for depth in range(len(path), 0, -1))
    of = next((dotted(part) for part in sections if section_at(part, document)), "")
    return f"see `raypp explain {of}`" if of else "see `raypp explain`"


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _value(path: KeyPath, document: Any) -> Any:
    for part in path:
        document = document[part]
    return document


# The types of the sections, in words: also for `raypp explain`.


def words_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describes the values that a type accepts: `a whole number ≥ 1`, `ring or ulysses`."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return words_of(inner, (*metadata, *extra))
    if any(getattr(constraint, "pattern", None) for constraint in _flat(metadata)):
        return "1 to 40 of a-z, 0-9 and -, not beginning with -"
    plain = {type(None), bool} & set(get_args(annotation)) or literals_of(annotation)
    if section_of(annotation) is not None and not plain:
        return "a section of keys"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return one_of([str(value) for value in arguments])
    if origin in (Union, types.UnionType):
        members = sorted(arguments, key=lambda member: member is type(None))
        return one_of([words_of(member, metadata if member is not type(None) else ()) for member in members])
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each {words_of(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {words_of(arguments[0])}"
    if origin is list:
        return f"a list, each {words_of(arguments[0])}"
    if origin is dict:
        return "a section of names and texts"
    return _PLAIN.get(annotation, "a section of keys") + _bounds(metadata)


def literals_of(annotation: Any) -> list[str]:
    """Returns the literal values that an annotation accepts; empty if it accepts others."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [word for member in get_args(annotation) for word in literals_of(member)]


def item_section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of the items of a list; None for other values."""
    lists = (member for member in _members(annotation) if get_origin(member) is list)
    return next((section for member in lists if (section := section_of(get_args(member)[0]))), None)


def section_at(path: KeyPath, document: Any) -> type[Section] | None:
    """Returns the section class at a key path of the job, or of the items of a list there. That of
    `model` depends on the document's `model.kind`."""
    section: type[Section] | None = Job
    for part in path:
        if isinstance(part, int):
            continue
        info = section.model_fields.get(part) if section else None
        section = section_of(info.annotation) or item_section_of(info.annotation) if info else None
        if part == "model" and len(path) >= 1 and path[0] == "model":
            section = model_options(document.get("model") if isinstance(document, dict) else None)
    return section


def field_at(path: KeyPath, document: Any) -> FieldInfo | None:
    """Returns the field at a key path; None for an item of a list or an unknown key."""
    section = section_at(path[:-1], document) if path else None
    return section.model_fields.get(str(path[-1])) if section else None


def expected_at(path: KeyPath, document: Any) -> str:
    """Describes the values accepted at a key path. For an item of a list, describes the list's
    items."""
    info = field_at(path, document)
    if info is not None:
        return words_of(info.annotation, tuple(info.metadata))
    parent = field_at(path[:-1], document) if path else None
    if parent is None:
        return "another value"
    items = [member for member in _members(parent.annotation) if get_origin(member) in (tuple, list, dict)]
    kinds = [one for one in get_args(items[0]) if one is not Ellipsis] if items else []
    return words_of(kinds[-1]) if kinds else "another value"


def all_sections(key: str = "", section: type[Section] = Job) -> Iterator[tuple[str, type[Section]]]:
    """Yields a section and all within it, each with its dotted key: "" for the job itself."""
    yield key, section
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation) or item_section_of(info.annotation)
        if inner is not None:
            yield from all_sections(f"{key}.{name}" if key else name, inner)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def one_of(words: list[str]) -> str:
    """Returns words as a choice: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(tuple(item.metadata))
        else:
            yield item


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {bound:g}"
        for constraint in _flat(metadata)
        for name, sign in signs.items()
        if (bound := getattr(constraint, name, None)) is not None and not (name == "le" and is_limit(bound))
    ]
    return " " + " and ".join(bounds) if bounds else ""


def is_limit(bound: float) -> bool:
    """Whether an upper bound is one of `spec.limits`, which no real job reaches. Only an error
    names those."""
    return bound >= limits.STAGES
