"""Finds calls that make the host wait for a device, in source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_METHODS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "bincount", "unique", "masked_select", "synchronize"}
)
"""Methods, or functions of torch, that wait whatever their arguments are."""


class Wait(NamedTuple):
    """A place that would wait if its tensor were on a GPU.

    Attributes:
        where: `module.function`; a method's has its class.
        what: The name that waits.
        line: Its line.
    """

    where: str
    what: str
    line: int


def host_waits(module: str, text: str) -> list[Wait]:
    """Returns the places of a file that wait, as far as its text shows.

    It cannot see `int(tensor)`, `if tensor:` and copies by `.to`:
    `tests/ranks/test_no_host_sync.py` does.
    """
    return sorted(_within(ast.parse(text), module))


def _within(node: ast.AST, where: str) -> Iterator[Wait]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}"
        what = _call(child) if isinstance(child, ast.Call) else _index(child)
        if what:
            yield Wait(where, what, child.lineno)  # type: ignore[attr-defined]
        yield from _within(child, inside)


def _call(call: ast.Call) -> str:
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
    if name in _METHODS:
        return name
    if name == "repeat_interleave" and "output_size" not in given:
        return name
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    if of_torch and name in ("tensor", "as_tensor") and "device" in given:
        return f"{name}(device=)"
    if of_torch and name == "where" and len(call.args) == 1:
        return "where"
    return ""


def _index(node: ast.AST) -> str:
    """Finds an index that is a comparison, its negation, or is named a mask."""
    if not isinstance(node, ast.Subscript):
        return ""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for part in parts:
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Invert):
            return "mask"
        if isinstance(part, ast.Compare) or (isinstance(part, ast.Name) and "mask" in part.id):
            return "mask"
    return ""
