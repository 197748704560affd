r"""Prints lines, JSON and errors for commands. No printed text can control the terminal. Commands
print through this file, or through `console.py` if they need tables. Both show control characters
as `\x1b`. `tests/lint/test_printing.py` finds commands that print otherwise."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from raypp.errors import JobError, Problem, RayppError
from raypp.untrusted.text import visible, visible_lines


class Styled(NamedTuple):
    """Text with the colours that `styled` gave it."""

    text: object
    style: Mapping[str, Any]


def styled(text: object, **style: Any) -> Styled:
    """Gives text the style of `click.style` (fg, bold, dim), for terminals."""
    return Styled(text, style)


def echo(*parts: object, err: bool = False) -> None:
    """Prints one line. A line feed in a part is shown as `\\n`, so that it stays one line. `parts`:
    printed without a space between them. `err`: to standard error."""
    click.echo("".join(_shown(part, visible) for part in parts), err=err)


def echo_lines(*parts: object, err: bool = False, nl: bool = True) -> None:
    """Prints text that may have several lines, such as an error or a log."""
    click.echo("".join(_shown(part, visible_lines) for part in parts), err=err, nl=nl)


def say(remark: str) -> None:
    echo_lines(remark, err=True)


def confirmed(question: str) -> bool:
    """Asks on the terminal whether to go on; without one it is a `JobError`, whose fix is --yes."""
    if not sys.stdin.isatty():
        raise JobError(Problem("--yes", "without a terminal nobody can be asked", "add --yes"))
    return click.confirm(question, err=True)


def echo_json(value: Any, indent: int | None = None) -> None:
    """Prints a JSON value, on one line without `indent`. ASCII only, without control characters."""
    click.echo(json_text(value, indent))


def write_file(path: Path, content: bytes) -> None:
    """Writes a file that the user named with `--out`. Raises JobError: it cannot be written."""
    try:
        path.write_bytes(content)
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None


def check_writable(path: Path) -> None:
    """Checks that a file which the user named with `--out` can be written, before long work for it.
    Leaves an existing file as it is, and no new one. Raises JobError: it cannot be written."""
    try:
        is_new = not os.path.lexists(path)
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns the JSON that `echo_json` prints."""
    # json.dumps escapes all control characters but DEL, which can only be inside a string.
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def _not_written(path: Path, error: Exception) -> JobError:
    return JobError(Problem("--out", f"cannot write {path}: {error}", "name another file"))


def _shown(part: object, show: Any) -> str:
    return click.style(show(part.text), **part.style) if isinstance(part, Styled) else str(show(part))


def show_error(error: RayppError) -> None:
    """Prints an error's problems to stderr, and their number if there are more than three."""
    for problem in error.problems:
        echo_lines(*problem_parts(problem), err=True)
    if len(error.problems) > 3:
        echo_lines(f"\n{summary(error.problems)}", err=True)


def problem_parts(problem: Problem) -> list[str | Styled]:
    """Formats a problem like `str(problem)`, in parts for `echo_lines`. Further lines of its texts
    are indented, so that none poses as another problem or a fix."""
    key = "" if problem.where.startswith(f"--set {problem.key}=") else problem.key
    place = _indented(" ".join(part for part in (problem.where, key) if part))
    fault, fix = _indented(problem.fault), _indented(problem.fix)
    parts: list[str | Styled] = [styled(place, bold=True), f": {fault}"] if place else [styled(fault, bold=True)]
    return [*parts, "\n  ", styled("fix:", fg="green"), f" {fix}"] if fix else parts


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def summary(problems: Sequence[Problem]) -> str:
    """Returns a summary such as `5 problems in job.yaml`."""
    files = {problem.where.rpartition(":")[0] for problem in problems if not problem.where.startswith("--set")} - {""}
    return f"{len(problems)} problems" + (f" in {files.pop()}" if len(files) == 1 else "")
