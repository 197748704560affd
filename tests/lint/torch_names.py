"""Finds uses of torch's private names (`_x`) in Python sources.

A source shows names, not types. So an attribute `_x` of anything but `self` counts as torch's
unless the project or another library defines it. The lint finds

- imports and dotted names below `torch` with a private part, also through an alias of `torch.nn`;
- attributes `_x` of other objects, written out or passed to `getattr` and its like as a string;
- methods and attributes of a class that override private ones of its torch base class;
- strings that name a private module (`torch._x`) or operator (`aten::_x`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_BY_TEXT = frozenset({"getattr", "setattr", "hasattr", "delattr"})
_PRIVATE_TEXT = re.compile(r"(torch|aten)\w*((\.|::)\w+)*(\.|::)_(?!_)\w+.*")
_NAMED_TUPLE = frozenset({"_asdict", "_fields", "_make", "_replace"})
_OF_LIBRARIES = frozenset({"_endpoint", "_expiry_time", "_get_conn", "_manager", "_raw", "_socket_options"})
"""Attributes of botocore's and urllib3's objects, which no import in the same file reveals."""


@dataclass(frozen=True, order=True)
class Use:
    line: int
    name: str


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


@dataclass
class Source:
    """A parsed file.

    Attributes:
        module: Its dotted name.
        nodes: All nodes of its syntax.
        imports: Dotted names by the names they are bound to.
        defined: Private names of functions, classes, variables and attributes that it defines.
    """

    module: str
    nodes: tuple[ast.AST, ...]
    imports: dict[str, str]
    defined: frozenset[str]

    @classmethod
    def of(cls, module: str, text: str) -> Source:
        nodes = tuple(ast.walk(ast.parse(text)))
        return cls(module, nodes, _imports(nodes), frozenset(filter(is_private, _definitions(nodes))))

    def dotted(self, node: ast.expr) -> str:
        """Returns the full name of an expression such as `nn.Module`; "" if it is not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        return ".".join([self.imports[node.id], *reversed(parts)])

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


@cache
def read_sources(root: Path, folders: tuple[str, ...]) -> list[Source]:
    """Parses all Python files of some folders, in seconds: call it in a test, not on import."""
    return [_read(root, path) for folder in folders for path in sorted((root / folder).rglob("*.py"))]


@cache
def _read(root: Path, path: Path) -> Source:
    return Source.of(".".join(path.relative_to(root).with_suffix("").parts), path.read_text())


def private_uses(source: Source, project: list[Source]) -> list[Use]:
    """Returns the places where a file uses a private name of torch.

    Args:
        project: All files. A private attribute that one of them defines belongs to the project;
            code in the package itself may use only those of its own file.
    """
    own = source.defined
    if not source.module.startswith("raypp."):
        own = own.union(*(other.defined for other in project))
    uses = {
        *_imported(source),
        *_attributes(source, own | _NAMED_TUPLE | _OF_LIBRARIES),
        *_texts(source),
        *_overridden(source, project),
    }
    return sorted(uses)


def _imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.partition(".")[0]
                found[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def _definitions(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif _of_self(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_torch(dotted: str) -> bool:
    return dotted.partition(".")[0] in ("torch", "torchgen", "functorch")


def _private_torch(dotted: str) -> bool:
    return _is_torch(dotted) and any(is_private(part) for part in dotted.split("."))


def _imported(source: Source) -> Iterator[Use]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        yield from (Use(node.lineno, name) for name in names if _private_torch(name))


def _attributes(source: Source, known: frozenset[str]) -> Iterator[Use]:
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and _by_text(node):
            owner, name = node.args[0], node.args[1].value  # type: ignore[attr-defined]
        else:
            continue
        if not is_private(name) or (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
            continue
        dotted = source.dotted(owner)
        if _is_torch(dotted) or (not dotted and name not in known):
            yield Use(node.lineno, f"{dotted or ast.unparse(owner)}.{name}")


def _by_text(call: ast.Call) -> bool:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called not in _BY_TEXT or len(call.args) < 2:
        return False
    return isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str)


def _texts(source: Source) -> Iterator[Use]:
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _PRIVATE_TEXT.fullmatch(node.value):
            yield Use(node.lineno, node.value)


def _overridden(source: Source, project: list[Source]) -> Iterator[Use]:
    for klass in source.classes():
        for base in _torch_bases(source, klass, project):
            taken = _members(base)
            for node in ast.walk(klass):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node in klass.body:
                    name = node.name
                elif _of_self(node):
                    name = node.attr
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _in_body(klass, node):
                    name = node.id
                else:
                    continue
                if is_private(name) and name in taken:
                    yield Use(node.lineno, f"{klass.name}.{name} of {base}")


def _in_body(klass: ast.ClassDef, name: ast.Name) -> bool:
    return any(
        name in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for statement in klass.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
    )


def _torch_bases(source: Source, klass: ast.ClassDef, project: list[Source]) -> Iterator[str]:
    """Yields the full names of the torch classes a class derives from, directly or indirectly."""
    for base in klass.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        dotted = source.dotted(base) or (f"{source.module}.{base.id}" if isinstance(base, ast.Name) else "")
        if _is_torch(dotted):
            yield dotted
            continue
        module, _, name = dotted.rpartition(".")
        for other in [source, *project]:
            if other.module == module:
                for parent in other.classes():
                    if parent.name == name and parent is not klass:
                        yield from _torch_bases(other, parent, project)
                break


@cache
def _members(dotted: str) -> frozenset[str]:
    """Returns private names of a torch class and its bases, including what they set on `self`."""
    module, _, name = dotted.rpartition(".")
    found: set[str] = set()
    klass: Any = getattr(importlib.import_module(module), name)
    for one in klass.__mro__[:-1]:
        found.update(vars(one))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError):  # written in C++
            continue
        found.update(node.attr for node in ast.walk(tree) if _of_self(node))
    return frozenset(filter(is_private, found))
