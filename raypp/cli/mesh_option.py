"""`--mesh pp=N` of commands that use a trained model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from raypp.errors import JobError, Problem


def mesh_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--mesh pp=N`, which the command gets as `pp`, the number of pipeline ranks."""
    text = "Ranks that the layers are split over."
    return click.option(
        "--mesh", "pp", metavar="pp=N", default="pp=1", show_default=True, callback=_pipeline_ranks, help=text
    )(function)


def _pipeline_ranks(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Returns N of `pp=N`.

    Raises:
        JobError: It is something else.
    """
    del context, parameter
    found = re.fullmatch(r"pp=([1-9][0-9]{0,4})", value.strip())
    if found is None:
        raise JobError(Problem("--mesh", f"{value!r} is not pp=N", "give the number of pipeline ranks, such as pp=4"))
    return int(found[1])
