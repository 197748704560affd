"""Reads JSON that others may have written: within limits, and of a declared shape. A shape is a
dataclass, a TypedDict or any other type that pydantic validates. Validation is strict: a number in
quotes is not a number. Ranges are part of the type (`Count`, `Annotated[int, Ge(1)]`)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

from annotated_types import Ge, Le, Lt
from pydantic import GetPydanticSchema, TypeAdapter, ValidationError

from raypp.errors import CheckpointError, Problem, RayppError
from raypp.untrusted.text import visible

T = TypeVar("T")

Count = Annotated[int, Ge(0), Le(2**63 - 1)]
"""A whole number of things or bytes."""

Time = Annotated[float, Ge(0), Lt(253_402_300_800)]
"""Seconds since 1970, before the year 10000: a date that can be shown."""

Seconds = Annotated[float, Ge(0), Le(1e10)]
"""A duration, of three centuries at most."""

AnyText = GetPydanticSchema(lambda _, handler: handler(str))
"""Annotates a `Literal` of which any text is read: another raypp may write words unknown here."""

_SHOWN_PROBLEMS = 3
_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Bounds:
    """Limits of one kind of document. `size`: bytes of the text. `values`: items of lists and
    objects, all together; commas and brackets are counted, also those in texts."""

    size: int = 16 << 20
    values: int = 300_000

    def hold(self, data: bytes) -> bool:
        """Returns whether a text is within them. Writers ask, so that it can be read."""
        return len(data) <= self.size and _values(data) <= self.values


def parse_json(
    data: bytes, place: str, bounds: Bounds = Bounds(), error: type[RayppError] = CheckpointError, fix: str = "", *,
    objects: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:  # fmt: skip
    """Parses JSON within bounds. `bounds`: limits; checked before the parser takes memory.
    `objects`: converts the keys and values of each object, inner ones first; None: to a dict. A
    ValueError of it says why the text is refused. Raises RayppError: of the given kind. It is not
    JSON, nested too deeply, or beyond the bounds."""
    _check_bounds(data, place, bounds, error, fix)
    try:
        return json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=objects)
    except RecursionError:
        _fail(error, place, "is nested too deeply", fix)
    except ValueError as cause:  # also of UTF-8, and of numbers with thousands of digits
        _fail(error, place, f"is not JSON: {visible(cause)}", fix, cause)


def parse_as(
    shape: type[T],
    data: bytes,
    place: str,
    bounds: Bounds = Bounds(),
    error: type[RayppError] = CheckpointError,
    fix: str = "",
    *,
    kind: str = "",
    unknown: Literal["forbid", "ignore", "allow"] = "forbid",
) -> T:
    """Parses JSON of a shape, within bounds. `shape`: a type that pydantic validates. `bounds`:
    limits; checked before the parser takes memory. `kind`: what the document should be, with its
    article; each problem then begins with `is not KIND: `. `unknown`: whether keys that the shape
    does not name are errors, left out, or kept. Raises RayppError: of the given kind, with a
    problem per wrong value, the first three."""
    _check_bounds(data, place, bounds, error, fix)
    try:
        adapter: TypeAdapter[T] = _adapter(cast(Any, shape))
        return adapter.validate_json(data, strict=True, extra=unknown)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_context=False)[:_SHOWN_PROBLEMS]
        start = f"is not {kind}: " if kind else ""
        raise error([Problem(place, start + described(details), fix) for details in errors]) from None


def parse_object(
    data: bytes, place: str, bounds: Bounds = Bounds(), error: type[RayppError] = CheckpointError, fix: str = ""
) -> dict[str, Any]:
    """Parses a JSON object of any shape, within bounds. NaN and Infinity are numbers in it. Raises
    RayppError: of the given kind; see `parse_as`."""
    return parse_as(dict[str, Any], data, place, bounds, error, fix, kind="a JSON object")


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _check_bounds(data: bytes, place: str, bounds: Bounds, error: type[RayppError], fix: str) -> None:
    if len(data) > bounds.size:
        _fail(error, place, f"has {len(data):,} bytes; at most {bounds.size:,} are read", fix)
    values = _values(data)
    if values > bounds.values:
        _fail(error, place, f"has about {values:,} values; at most {bounds.values:,} are read", fix)


def _values(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def described(details: Any) -> str:
    """Describes an error of pydantic: `objects[3].size is -1: should be greater than …`."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{visible(part)}" for part in details["loc"])
    where = where.removeprefix(".")
    message = details["msg"].removeprefix("Input ")
    if details["type"] in ("missing", "missing_argument"):
        return f"{where} is missing"
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is not a known key"
    if details["type"] == "json_invalid":
        return f"is not JSON: {visible(message.removeprefix('Invalid JSON: '))}"
    return f"{where + ' ' if where else ''}is {shown(details['input'])}: {visible(message)}"


def shown(value: Any) -> str:
    """Formats a foreign value for an error, truncated if long."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        value = value[: 2 * _LONGEST_VALUE]
    text = visible(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _fail(error: type[RayppError], place: str, fault: str, fix: str, cause: BaseException | None = None) -> NoReturn:
    raise error(Problem(place, fault, fix)) from cause
