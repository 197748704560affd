"""The environment of chat templates: what a template may do, and how much of it.

A template comes with a model that somebody else published. Jinja's sandbox keeps it away from the
process; the limits here end loops, recursion, and texts that grow without end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 1 << 20
"""Characters of a template."""
MOST_OUTPUT = 64 << 20
"""Characters that one rendering may write, also into variables."""
MOST_STEPS = 1_000_000
"""Iterations and calls of one rendering."""
MOST_SECONDS = 20.0
"""CPU time of all renderings of one row."""
_MOST_NUMBER = 10_000  # an argument of a filter, such as a width
_MOST_ITEMS = 1_000_000
_MOST_BITS = 4096
_LONG_DATA = 256
_WIDTH = re.compile(r"\d{5}|\*")
_LOOK_ONLY = frozenset((
    "default", "d", "length", "count", "first", "last", "list", "items", "map", "select", "reject", "selectattr",
    "rejectattr", "sort", "unique", "reverse", "batch", "slice", "groupby", "dictsort", "sum", "min", "max", "attr",
    "random",
))  # fmt: skip
"""Filters that do not write out the lists that they are given."""
_WIDE = frozenset((
    "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "format", "urlize",
    "tojson", "pprint",
))  # fmt: skip
"""Filters and methods that write as much as a number says."""


class TemplateLimit(TemplateRuntimeError):
    """A template exceeds a limit."""


class Budget:
    """What one rendering has used.

    Args:
        until: When it must end, by `time.thread_time`; None: `MOST_SECONDS` from now.
    """

    def __init__(self, until: float | None = None) -> None:
        self.steps = self.written = 0
        self.until = deadline() if until is None else until

    def step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TemplateLimit(f"more than {MOST_STEPS:,} iterations and calls")
        if self.steps % 256 == 1 and time.thread_time() > self.until:
            raise TemplateLimit(f"more than {MOST_SECONDS:g} s of computing")

    def write(self, characters: int) -> None:
        self.written += characters
        if self.written > MOST_OUTPUT:
            raise TemplateLimit(f"more than {MOST_OUTPUT:,} characters of output")


def deadline() -> float:
    """Returns when the renderings of a row that begins now must end."""
    return time.thread_time() + MOST_SECONDS


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Not thread-safe; set `budget` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self.budget = Budget()
        self.filters["_counted"] = pass_context(lambda _, values: self._counted(values))
        self.filters["_finalized"] = pass_context(lambda _, value: self._finalized(value))
        self.filters["_at"] = pass_context(lambda _, item, loop: self.at(item, loop))

    def guard_filters(self) -> None:
        """Checks the arguments of all filters. Call it once, after adding filters."""
        for name, function in list(self.filters.items()):
            if not name.startswith("_"):
                self.filters[name] = self._guarded(name, function)

    def bounded(self, source: str) -> nodes.Template:
        """Parses a template; its loops, concatenations and long texts will count.

        Raises:
            TemplateSyntaxError: It is not a template.
        """
        parsed = self.parse(source)
        bounded: nodes.Template = _Bounds().visit(parsed)
        return bounded

    def at(self, item: Any, loop: int) -> None:
        """Called where an iteration of a loop begins, and with None where the loop has ended."""

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.step()
        if isinstance(function, LoopContext) and args:  # a recursive loop
            args = (self._counted(args[0]), *args[1:])
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            if args and function.__name__ == "join":
                args = ([self._finalized(item) for item in self._counted(args[0])], *args[1:])
            self._check(function.__name__, (owner, *args))
        return self._charged(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "%" and isinstance(left, str):
            self._check("format", (left, *(right if isinstance(right, tuple) else (right,))))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            self.budget.write(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > _MOST_ITEMS:
                    raise TemplateLimit(f"a product of more than {_MOST_ITEMS:,} items")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateLimit(f"a number of more than {_MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check("format", (value.__self__, *args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def _counted(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.budget.step()
            yield value

    def _finalized(self, value: Any) -> Any:
        """Counts a value that is about to be written; returns it as it is."""
        self.budget.write(_written(value))
        return value

    def _charged(self, result: Any) -> Any:
        if isinstance(result, str) and len(result) > _LONG_DATA:
            self.budget.write(len(result))
        return result

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = hasattr(function, "jinja_pass_arg")

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            given = args[1:] if passes else args
            if name == "join" and given and isinstance(given[0], Iterator):
                given = ([self._finalized(item) for item in self._counted(given[0])], *given[1:])
                args = (args[0], *given) if passes else given
            if name not in _LOOK_ONLY:
                self._check(name, (*given, *kwargs.values()))
            elif given:
                self._check_numbers(name, (*given[1:], *kwargs.values()))
            return self._charged(function(*args, **kwargs))

        checked.__dict__.update(getattr(function, "__dict__", {}))
        return checked

    def _check(self, name: str, args: tuple[Any, ...]) -> None:
        self._check_numbers(name, args[1:])
        size = sum(map(_written, args))
        if name in ("replace", "join") and args:
            others = max((len(arg) for arg in args[1:] if isinstance(arg, str)), default=0)
            items = len(args[0]) if isinstance(args[0], str | list | tuple | dict) else 0
            if name == "join" and isinstance(args[0], str) and len(args) > 1 and isinstance(args[1], list | tuple):
                others, items = len(args[0]), len(args[1])
            size += items * others if others > 1 else 0
        if name == "format" and args and isinstance(args[0], str) and _WIDTH.search(args[0]):
            raise TemplateLimit("a width of five digits in format")
        if size > MOST_OUTPUT:
            self.budget.write(size)

    def _check_numbers(self, name: str, args: Iterable[Any]) -> None:
        if name in _WIDE and any(type(arg) is int and abs(arg) > _MOST_NUMBER for arg in args):
            raise TemplateLimit(f"{name} with a number above {_MOST_NUMBER:,}")


def _written(value: Any) -> int:
    """Returns about how many characters a value has when it is written out."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return 8
    size, rest = 0, [value]
    while rest:
        one = rest.pop()
        size += len(one) if isinstance(one, str) else 32
        if size > MOST_OUTPUT:
            raise TemplateLimit(f"more than {MOST_OUTPUT:,} characters of output")
        if isinstance(one, dict):
            rest += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            rest += one
    return size


class _Bounds(NodeTransformer):
    """Makes loops count their iterations and tell their items, and long texts be counted."""

    _loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        if isinstance(node.target, nodes.Name) and not node.recursive:
            self._loops += 1
            item = nodes.Name(node.target.name, "load", lineno=node.lineno)
            node.body.insert(0, self._noted(item))
            return [node, self._noted(nodes.Const(None, lineno=node.lineno))]
        return [node]

    def _noted(self, item: nodes.Expr) -> nodes.ExprStmt:
        call = _filtered(item, "_at", nodes.Const(self._loops, lineno=item.lineno))
        return nodes.ExprStmt(call, lineno=item.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_finalized") for part in node.nodes]
        return _filtered(node, "_finalized")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        if len(node.data) <= _LONG_DATA:
            return node
        return _filtered(nodes.Const(node.data, lineno=node.lineno), "_finalized")


def _filtered(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
