"""The base class of every section of the job file, and the paths of keys in it."""

import re
import types
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict

KeyPath = tuple[str | int, ...]


class Section(BaseModel):
    """Base class of the sections of the job file. Unknown keys are errors. Immutable."""

    # defer_build: pydantic builds validators on first use, so that `raypp --help` need not wait.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the (first) section class of an annotation; None for a plain value."""
    return _section_of(annotation)


@cache
def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if issubclass(annotation, Section) else None
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((section for member in get_args(annotation) if (section := section_of(member))), None)
    return None


def dotted(path: KeyPath) -> str:
    """Formats a key path as `pipeline.layers_per_stage[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def undotted(key: str) -> KeyPath:
    """Returns the key path of a dotted key (`a.b[1]`)."""
    parts = re.findall(r"\[(\d{1,9})\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else name for index, name in parts)
