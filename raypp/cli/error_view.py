"""Shows errors on the terminal: where, what is wrong, how to fix it."""

from __future__ import annotations

from collections.abc import Sequence

from raypp.cli.output import Styled, echo_lines, styled
from raypp.errors import Problem, RayppError


def show_error(error: RayppError) -> None:
    """Prints an error's problems to stderr, and their number if there are more than three."""
    for problem in error.problems:
        echo_lines(*problem_parts(problem), err=True)
    if len(error.problems) > 3:
        echo_lines(f"\n{summary(error.problems)}", err=True)


def problem_parts(problem: Problem) -> list[str | Styled]:
    """Formats a problem like `str(problem)`, in parts for `echo_lines`.

    Further lines of its texts are indented, so that none poses as another problem or a fix.
    """
    key = "" if problem.where.startswith(f"--set {problem.key}=") else problem.key
    place = _indented(" ".join(part for part in (problem.where, key) if part))
    what, fix = _indented(problem.what), _indented(problem.fix)
    parts: list[str | Styled] = [styled(place, bold=True), f": {what}"] if place else [styled(what, bold=True)]
    return [*parts, "\n  ", styled("fix:", fg="green"), f" {fix}"] if fix else parts


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def summary(problems: Sequence[Problem]) -> str:
    """Returns a summary such as `5 problems in job.yaml`."""
    files = {problem.where.rpartition(":")[0] for problem in problems if not problem.where.startswith("--set")} - {""}
    return f"{len(problems)} problems" + (f" in {files.pop()}" if len(files) == 1 else "")
