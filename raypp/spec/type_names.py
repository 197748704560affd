"""Describes the types of the pydantic models in words, for error messages and `raypp explain`."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypp.spec import limits
from raypp.spec.families import model_options
from raypp.spec.job import Job
from raypp.spec.section import KeyPath, Section

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


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
        return _or([str(value) for value in arguments])
    if origin in (Union, types.UnionType):
        members = sorted(arguments, key=lambda member: member is type(None))
        return _or([words_of(member, metadata if member is not type(None) else ()) for member in members])
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


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the (first) section class of an annotation; None for a plain value."""
    return _section_of(annotation)


@functools.cache
def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if issubclass(annotation, Section) else None
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((section for member in get_args(annotation) if (section := section_of(member))), None)
    return None


def item_section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of the items of a list; None for other values."""
    lists = (member for member in _members(annotation) if get_origin(member) is list)
    return next((section for member in lists if (section := section_of(get_args(member)[0]))), None)


def section_at(path: KeyPath, document: Any) -> type[Section] | None:
    """Returns the section class at a key path of the job, or of the items of a list there.

    That of `model` depends on the document's `model.kind`.
    """
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
    """Describes the values accepted at a key path.

    For an item of a list, describes the list's items.
    """
    info = field_at(path, document)
    if info is not None:
        return words_of(info.annotation, tuple(info.metadata))
    parent = field_at(path[:-1], document) if path else None
    if parent is None:
        return "another value"
    items = [member for member in _members(parent.annotation) if get_origin(member) in (tuple, list, dict)]
    return words_of(get_args(items[0])[-1]) if items else "another value"


def all_sections(key: str = "", section: type[Section] = Job) -> Iterator[tuple[str, type[Section]]]:
    """Yields a section and all within it, each with its dotted key: "" for the job itself."""
    yield key, section
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation) or item_section_of(info.annotation)
        if inner is not None:
            yield from all_sections(f"{key}.{name}" if key else name, inner)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _or(words: list[str]) -> str:
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
    """Whether an upper bound is one of `spec.limits`, which no real job reaches.

    Only an error names those.
    """
    return bound >= limits.STAGES
