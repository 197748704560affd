"""Shows errors on the terminal: where, what is wrong, how to fix it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from raypp.errors import Problem, RayppError


def show_error(error: RayppError) -> None:
    """Prints an error's problems to stderr, and their number if there are more than three."""
    for problem in error.problems:
        click.echo(styled(problem), err=True)
    if len(error.problems) > 3:
        click.echo(f"\n{summary(error.problems)}", err=True)


def styled(problem: Problem) -> str:
    """Formats a problem like `str(problem)`, but in colour if the terminal has colours."""
    key = "" if problem.where.startswith(f"--set {problem.key}=") else problem.key
    place = " ".join(part for part in (problem.where, key) if part)
    text = f"{click.style(place, bold=True)}: {problem.what}" if place else click.style(problem.what, bold=True)
    return f"{text}\n  {click.style('fix:', fg='green')} {problem.fix}" if problem.fix else text


def summary(problems: Sequence[Problem]) -> str:
    """Returns a summary such as `5 problems in job.yaml`."""
    files = {problem.where.rpartition(":")[0] for problem in problems if not problem.where.startswith("--set")} - {""}
    return f"{len(problems)} problems" + (f" in {files.pop()}" if len(files) == 1 else "")
