"""Paths that others may have written."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """Returns the path with `~` as the home directory.

    Leaves `~name` as it is if there is no such user, so that the error is that of a missing file.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for unknown users


def same_place(url: str, other: str) -> bool:
    """Returns whether two URLs of stores, or paths of directories on this machine, are the same
    place. Links are followed."""
    if url == other or "://" in url + other:
        return url == other
    return os.path.realpath(url) == os.path.realpath(other)
