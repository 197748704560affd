"""`kind:` -> options class and builder: the one plug-in mechanism.

A registry holds, for each kind of one thing (models, data sources, stores …), the pydantic class of
its options and where its builder is. Builders are named as `package.module:function` and imported
only when they are used, so that the job language can be read without importing torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.errors import JobError, Problem


@dataclass(frozen=True)
class Kind:
    """One entry: its name, the class of its options (or None), its builder, and one line of help."""

    name: str
    options: type[Any] | None
    builder: str | Callable[..., Any]
    summary: str = ""

    def build(self) -> Callable[..., Any]:
        """The builder itself, imported now when it was given by name."""
        return load_object(self.builder) if isinstance(self.builder, str) else self.builder


class Registry:
    """The kinds of one thing, in the order they were registered.

    Args:
        noun: What the kinds are kinds of, for messages: "model", "schedule".
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._kinds: dict[str, Kind] = {}

    def register(
        self,
        name: str,
        builder: str | Callable[..., Any],
        *,
        options: type[Any] | None = None,
        summary: str = "",
    ) -> Kind:
        """Adds a kind; a name can be taken once."""
        if name in self._kinds:
            raise ValueError(f"{self.noun} kind {name!r} is registered twice")
        kind = Kind(name, options, builder, summary)
        self._kinds[name] = kind
        return kind

    def register_modules(self, package: str, builder: str) -> None:
        """Adds every module of a package as the kind of its name, without importing it.

        Args:
            package: Its modules are the kinds; the first line of a module's docstring is the kind's summary.
            builder: The name of the builder in each module.
        """
        spec = importlib.util.find_spec(package)
        folders = spec.submodule_search_locations or () if spec is not None else ()
        files = [file for folder in folders for file in Path(folder).glob("*.py") if file.stem != "__init__"]
        for file in sorted(files):
            words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            self.register(file.stem, f"{package}.{file.stem}:{builder}", summary=words.partition("\n")[0])

    def names(self) -> list[str]:
        return list(self._kinds)

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def get(self, name: str, *, key: str = "") -> Kind:
        """The kind of that name, or a user's own given as `module.path:object`.

        Raises:
            JobError: No such kind; the message lists those there are and the closest name.
        """
        if name in self._kinds:
            return self._kinds[name]
        if ":" in name:
            return Kind(name, None, name, "user's own")
        close = difflib.get_close_matches(name, self._kinds, n=1)
        raise JobError(
            Problem(
                key,
                f"there is no {self.noun} {name!r}; there are: {', '.join(self._kinds)}",
                f"did you mean {close[0]!r}?" if close else f"use one of them, or your own as module.path:{self.noun}",
            )
        )


def load_object(path: str) -> Any:
    """Imports `package.module:attribute`.

    Raises:
        JobError: The module or the attribute is not there; the message says which.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        what = f"cannot import {module_name!r} (from {path!r}): {error}"
        raise JobError(Problem("", what, "is it installed, or on PYTHONPATH, on every node?")) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise JobError(Problem("", f"module {module_name!r} has no {attribute!r} (from {path!r})")) from None
