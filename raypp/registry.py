"""Registries: map a name in a job file to what it stands for. The only plug-in mechanism.

A registry holds the kinds of one thing: models, data sources, schedules, stores, optimizers. A kind
declares itself in the file that implements it:

    KIND = ScheduleKind("gpipe", "all forwards, then all backwards")

The registry reads such declarations without importing their files, so that the job language knows
every kind and no command waits for torch. The arguments of a declaration must therefore be
literals. The function that builds the thing is imported on first use.
"""

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from raypp.errors import JobError, Problem, origin_in_words, place_in_user_code

DECLARATION = "KIND"
"""The module attribute that declares a kind."""


@dataclass(frozen=True)
class Kind:
    """One entry of a registry. Each registry has a subclass with the properties of its kinds.

    Attributes:
        name: Its name in the job file.
        summary: One line of help.
        available: False if the job language knows the name but this version does not support it.
        position: Sort key of lists of kinds. Ties are sorted by name.
        builder: The function that builds it, or `package.module:function`. Filled in for a kind
            that declares itself.
        own: True for a user's own kind: raypp checks what it builds. Filled in by the registry.
    """

    name: str
    summary: str = ""
    available: bool = True
    position: int = 100
    builder: str | Callable[..., Any] = ""
    own: bool = False

    @classmethod
    def undeclared(cls, name: str) -> Self:
        """Returns the kind of a user's own function whose module declares none."""
        return cls(name, "your own")

    def build(self) -> Callable[..., Any]:
        """Returns the builder. Imports it now if it was given by name. Raises JobError: the kind is
        not available, or its builder cannot be imported."""
        if not self.available:
            raise JobError(Problem("", f"{self.name} is not available yet ({self.summary})"))
        return load_object(self.builder) if isinstance(self.builder, str) else self.builder


K = TypeVar("K", bound=Kind)


class Registry(Generic[K]):
    """The kinds of one thing: those in raypp's package, and those of installed packages.

    Args:
        noun: What a kind is, for messages: "model", "schedule".
        entry: Class of its kinds.
        package: Package whose modules are searched for a `KIND` of that class.
        function: Name of the builder in such a module.
        group: Entry-point group in which installed packages list modules with a `KIND`.
        kinds: All of raypp's kinds by name, in their order, in place of a package.
    """

    def __init__(
        self,
        noun: str,
        entry: type[K],
        package: str = "",
        function: str = "",
        group: str = "",
        kinds: Mapping[str, K] | None = None,
    ) -> None:
        self.noun, self.group = noun, group
        self._entry, self._package, self._function, self._given = entry, package, function, kinds

    def names(self) -> list[str]:
        return list(self._listed)

    def usable(self) -> list[K]:
        return [kind for kind in self if kind.available]

    def __iter__(self) -> Iterator[K]:
        return iter(self._listed.values())

    def __contains__(self, name: object) -> bool:
        return name in self._in_raypp or name in self._listed

    def is_built_in(self, name: str) -> bool:
        """Whether the kind is one of raypp's own."""
        return name in self._in_raypp

    def get(self, name: str, *, key: str = "", fix: str = "") -> K:
        """Returns the kind of that name, or a user's own kind given as `module.path:function`.
        `name`: value in the job file. `fix`: fix to suggest if no name is close to this one. Raises
        JobError: there is no such kind. The message lists the kinds and suggests the closest name.
        Or the declaration of a user's own kind cannot be read."""
        if name in self._in_raypp:
            return self._in_raypp[name]
        if ":" in name:
            return self._own(name, name, key)
        kinds = self._listed
        if name in kinds:
            return kinds[name]
        usable = [kind.name for kind in self.usable()]
        close = difflib.get_close_matches(name, kinds, n=1)
        fix = f"did you mean {close[0]!r}?" if close else fix or "use one of them, or your own as module.path:function"
        raise JobError(Problem(key, f"there is no {self.noun} {name!r}; there are: {', '.join(usable)}", fix))

    @cached_property
    def _in_raypp(self) -> Mapping[str, K]:
        """The kinds without those of installed packages, whose list takes longer to read."""
        if self._given is not None:
            return self._given
        ours = sorted(self._in_package(), key=lambda kind: (kind.position, kind.name))
        return {kind.name: kind for kind in ours}

    @cached_property
    def _listed(self) -> dict[str, K]:
        points = importlib.metadata.entry_points(group=self.group) if self.group else ()
        others = {point.name: self._installed_kind(point.name, point.value) for point in points}
        return {**self._in_raypp, **others, **self._in_raypp}  # ours come first and win name clashes

    def _in_package(self) -> Iterator[K]:
        spec = importlib.util.find_spec(self._package) if self._package else None
        files = [file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).iterdir()]
        taken: dict[str, Path] = {}
        for file in sorted(file for file in files if file.suffix == ".py"):
            kind = self._declared(file, f"{self._package}.{file.stem}:{self._function}")
            if kind is not None:
                if kind.name in taken:
                    raise ValueError(f"{self.noun} kind {kind.name!r} is declared in {taken[kind.name]} and in {file}")
                taken[kind.name] = file
                yield kind

    def _declared(self, file: Path, builder: str) -> K | None:
        """Returns the kind that a file declares; None if it declares none of this registry."""
        declaration = _declaration(file, self._entry.__name__)
        if declaration is None:
            return None
        arguments, keywords = declaration
        return self._entry(*arguments, **keywords | {"builder": builder})

    def _own(self, name: str, value: str, key: str = "") -> K:
        """Returns a user's own kind as declared, else `undeclared`. Raises JobError: unreadable."""
        module, _, function = value.partition(":")
        spec = _spec(module)
        builder = f"{module}:{function or self._function}"
        file = spec.origin if spec is not None and spec.has_location else None
        try:
            if file and file.endswith(".py"):
                ast.parse(Path(file).read_bytes(), file)
            declared = self._declared(Path(file), builder) if file and function in ("", self._function) else None
        except SyntaxError as error:
            raise _not_imported(value, error) from error
        except (ValueError, TypeError) as error:
            fault = f"cannot read {DECLARATION} of {value!r}: {error}"
            fix = f"write {DECLARATION} = {self._entry.__name__}(name, summary, …) with its arguments as literals"
            raise JobError(Problem(key, fault, fix)) from error
        return replace(declared or self._entry.undeclared(name), name=name, builder=builder, own=True)

    def _installed_kind(self, name: str, value: str) -> K:
        """Returns a kind of an installed package; not available if its module cannot be found."""
        kind = self._own(name, value)
        module = value.partition(":")[0]
        return kind if is_module(module) else replace(kind, available=False, summary=f"cannot import {module}")


def is_module(name: str) -> bool:
    """Whether a module exists. Imports the packages that contain it, but not the module itself."""
    return _spec(name) is not None


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, TypeError):  # the last two: of names that no module can have
        return None
    except Exception as error:  # of a package that contains it
        raise _not_imported(module, error) from error


def _not_imported(path: str, error: BaseException) -> JobError:
    here = not isinstance(error, ImportError) and place_in_user_code(error)
    fix = "correct that line" if here else "install it on every node, or put it on PYTHONPATH"
    fault = f"cannot import {path.partition(':')[0]!r} (from {path!r}): {origin_in_words(error)}"
    return JobError(Problem("", fault, fix))


def _declaration(file: Path, class_name: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns the arguments of `KIND = class_name(…)` in a file; None if there is no such line.
    Raises ValueError: an argument is not a literal."""
    text = file.read_text(encoding="utf-8")
    opening = f"{DECLARATION} = {class_name}("
    start = 0 if text.startswith(opening) else text.find(f"\n{opening}") + 1
    if not text.startswith(opening, start):
        return None
    end = start
    while True:  # the statement ends at the first line where it parses
        end = text.find("\n", end + 1)
        try:
            statement = ast.parse(text[start : end if end >= 0 else len(text)]).body[0]
            break
        except SyntaxError:
            if end < 0:
                raise
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    call = statement.value
    try:
        arguments = [ast.literal_eval(one) for one in call.args]
        return arguments, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except ValueError as error:
        fault = f"{file}: {opening}…) is read without importing the file: write its arguments as literals"
        raise ValueError(fault) from error


def load_object(path: str) -> Any:
    """Imports `package.module:attribute`. Raises JobError: the module or the attribute does not
    exist, or the module raises an error. The message says which."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # ValueError, TypeError: of names that no module can have; the user's raises any
        raise _not_imported(path, error) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        fault = f"module {module_name!r} has no {attribute!r} (from {path!r})"
        raise JobError(Problem("", fault, "check the name after the colon")) from None
