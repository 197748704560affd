"""Errors that a user can act on: where, what, and how to fix it. Everything that a user can cause
is raised as a `RayppError`. The command line prints its problems and exits with its exit code,
without a traceback. All of them can be pickled, because they cross process borders; exceptions with
a custom constructor must define `__reduce__` for that."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from raypp.failure_kinds import FailureKind

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_RESOURCES = 4
EXIT_INTERRUPTED = 130
_RAYPP = Path(__file__).resolve().parent
_LONGEST_WORDS, _LONGEST_LINE, _LONGEST_CHAIN = 1000, 200, 20


def in_words(error: BaseException) -> str:
    """Returns an exception's message. Only a `RayppError` explains itself. Any other exception is
    prefixed by its type, because the text of a `KeyError`, for example, is only its key."""
    return str(error) if isinstance(error, RayppError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def first_of(words: Sequence[str], most: int) -> str:
    """Returns the first `most` words, and how many there are besides: `a, b and 3 more`."""
    return ", ".join(words[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def words_after_stack(text: str) -> str | None:
    """Returns what follows the last stack frame in a text, the error's type and words. None if the
    text has no stack. Ray keeps errors of other processes as text."""
    lines = text.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return None
    after = lines[frames[-1] + 1 :] or lines[-1:]
    while len(after) > 1 and after[0].startswith("    "):  # the code of that place
        del after[0]
    return "\n".join(after)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `key`: dotted key of the job file (`mesh.pp`), or another short name
    of the place (an object's key, an option); empty if there is none. `fix`: what the user can do
    about it; empty if there is nothing more useful to say. `where`: `file:line` if the problem is
    in a file; filled in by the code that knows the file."""

    key: str
    fault: str
    fix: str = ""
    where: str = ""

    def located(self, where: str) -> Problem:
        """Returns the problem with this `file:line`, unless it already has one."""
        return self if self.where else replace(self, where=where)

    def __str__(self) -> str:
        place = " ".join(part for part in (self.where, self.key) if part)
        head = f"{place}: {self.fault}" if place else self.fault
        return f"{head}\n  fix: {self.fix}" if self.fix else head


class RayppError(Exception):
    """Base class of the errors that a user can act on. `exit_code`: exit code of the command line.
    `failure_kind`: the kind of failure if it ends a rank; None if its cause decides."""

    exit_code = EXIT_RUN_FAILED
    failure_kind: ClassVar[FailureKind | None] = None

    def __init__(self, problems: Problem | str | Iterable[Problem], fix: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem("", problems, fix)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[RayppError], tuple[Sequence[Problem]]]:
        return (type(self), (self.problems,))


class JobError(RayppError):
    """The job file or the arguments of a command are wrong."""

    exit_code = EXIT_USAGE
    failure_kind = FailureKind.USER_ERROR


class UnreachableError(RayppError):
    """No cluster or store answers at the given address, or it denies access."""

    exit_code = EXIT_UNREACHABLE
    failure_kind = FailureKind.UNREACHABLE


class ResourcesError(RayppError):
    """The cluster's devices are too few, too small, or not the ones that the job needs."""

    exit_code = EXIT_RESOURCES


class RunFailedError(RayppError):
    """The run ended without finishing its steps."""


class CheckpointError(RayppError):
    """A checkpoint is missing, torn or corrupt; the problem names the object."""


class DataError(RayppError):
    """The training data cannot be used; raised when a rank opens or reads it. Never retried."""

    exit_code = EXIT_USAGE
    failure_kind = FailureKind.USER_ERROR


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and the errors that caused it, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def origin_in_words(error: BaseException) -> str:
    """Returns the root of an error's causes, with its place in the user's own code and that line;
    then where raypp was, and what the root became. A `RayppError` explains itself."""
    if isinstance(error, RayppError):
        return str(error)
    *outer, root = chain = _chain(error)
    text = f"SyntaxError: {root.msg}" if isinstance(root, SyntaxError) else in_words(root)
    text = text if len(text) <= _LONGEST_WORDS else f"{text[:_LONGEST_WORDS]} …"
    notes = [f"at {place}"] if (place := place_in_user_code(error)) else []
    frames = (frame for one in chain for frame in traceback.extract_tb(one.__traceback__))
    if ours := [frame for frame in frames if _is_below(frame.filename, str(_RAYPP))]:
        notes.append(f"raypp was in {Path(ours[-1].filename).resolve().relative_to(_RAYPP.parent)}:{ours[-1].lineno}")
    for one in reversed(outer):  # of those between, only the user's own say more
        if one is error or _user_frame(one) is not None:
            line = next(iter(str(one).strip().splitlines()), "").rstrip(":")[:_LONGEST_LINE]
            notes.append(f"then {type(one).__name__}: {line}".removesuffix(": "))
    return f"{text}{chr(10) if chr(10) in text else ' '}({'; '.join(notes)})" if notes else text


def place_in_user_code(error: BaseException) -> str | None:
    """Returns `file:line in function: code` of the innermost place that is neither raypp's nor a
    library's, that is, of the user's own model or data code; None when there is none."""
    for one in reversed(_chain(error)):
        if isinstance(one, SyntaxError) and one.filename and _is_users(one.filename):
            return f"{_shown(one.filename)}:{one.lineno}: {(one.text or '').strip()[:_LONGEST_LINE]}"
        if (frame := _user_frame(one)) is not None:
            code = f": {frame.line[:_LONGEST_LINE]}" if frame.line else ""
            return f"{_shown(frame.filename)}:{frame.lineno} in {frame.name}{code}"
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and its causes, the root last. What the user's code raised while it handled
    another error has only a stated cause (`raise … from`)."""
    chain = [error]
    for _ in range(_LONGEST_CHAIN):
        last = chain[-1]
        implicit = None if last.__suppress_context__ or _user_frame(last) else last.__context__
        inner = last.exceptions[0] if isinstance(last, BaseExceptionGroup) else last.__cause__ or implicit
        chain += [inner] if inner is not None else []
    return chain[: chain.index(chain[-1]) + 1]


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if _is_users(frame.filename)), None)


@cache
def _is_users(file: str) -> bool:
    paths = sysconfig.get_paths()
    libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return Path(file).is_absolute() and not any(_is_below(file, folder) for folder in (str(_RAYPP), *libraries))


@cache
def _is_below(file: str, folder: str) -> bool:
    return Path(folder).resolve() in Path(file).resolve().parents


def _shown(file: str) -> str:
    """Returns the path; of a file that travelled with the job, as it is named there."""
    travelled = _RAYPP.parent.name.startswith("_ray_pkg_") and _is_below(file, str(_RAYPP.parent))
    return str(Path(file).resolve().relative_to(_RAYPP.parent)) if travelled else file


def size_text(size: float) -> str:
    """Returns a number of bytes as text, with three digits: 320 KiB, 1.73 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{three_digits(size / 1024**power)} {unit}"
    return f"{size:.0f} B"


def three_digits(value: float) -> str:
    """Returns a number with three significant digits, or all before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
