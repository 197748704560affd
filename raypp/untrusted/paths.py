"""Paths that others may have written."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """Returns the path with `~` as the home directory.

    Leaves `~name` as it is if there is no such user, so that the error is that of a missing file.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for unknown users
