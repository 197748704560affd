"""The argument of commands that take a job file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument `JOB` (as `job`, a path) and the option `--set` (as `overrides`)."""
    setting = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace one value of the job file, e.g. --set mesh.pp=4. Can be repeated.",
    )
    return click.argument("job", type=click.Path(path_type=Path))(setting(command))
