"""Reads files that somebody else may have placed: regular ones only, up to a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from raypp.errors import DataError, Problem, RayppError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special_kind(path: Path) -> str | None:
    """Returns in words what kind of file a path is; None for regular files and folders.

    A link is followed; one that leads nowhere is special, too.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as cause:
        return f"a link that cannot be followed ({getattr(cause, 'strerror', cause)})" if path.is_symlink() else None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return kind_of(mode)


def kind_of(mode: int) -> str:
    """Returns in words what a file is that is not regular, from its `st_mode`."""
    return next((name for test, name in _KINDS if test(mode)), "no regular file")


def open_file(path: Path, error: type[RayppError] = DataError, place: str = "", fix: str = "") -> BinaryIO:
    """Opens a regular file for reading, in binary. Never waits, as opening a FIFO would.

    Args:
        path: The file; a link is followed.
        error: The kind of error to raise.
        place: Where the user named it, for errors; empty: the path.
        fix: What the user can do; empty: a fix that fits the problem.

    Raises:
        RayppError: Of the given kind. It is missing, is no regular file, or cannot be opened.
    """
    where = place or str(path)
    named = f"{path} " if place else ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error(Problem(where, f"{named}does not exist", fix or "check the path")) from None
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        said = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise error(
            Problem(where, f"{named}cannot be opened: {said}", fix or "check the path and its permissions")
        ) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(Problem(where, f"{named}is {kind_of(mode)}", fix or "use a regular file"))
    return os.fdopen(descriptor, "rb")


def read_file(
    path: Path, most_bytes: int, error: type[RayppError] = DataError, place: str = "", fix: str = ""
) -> bytes:
    """Reads a whole regular file of at most `most_bytes`.

    Args:
        path: The file; a link is followed.
        most_bytes: Larger files are errors.
        error: The kind of error to raise.
        place: Where the user named it, for errors; empty: the path.
        fix: What the user can do; empty: a fix that fits the problem.

    Raises:
        RayppError: Of the given kind. It is missing, is no regular file, cannot be read, or is too
            large.
    """
    with open_file(path, error, place, fix) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as cause:
            raise error(Problem(place or str(path), f"cannot be read: {cause.strerror}", fix)) from None
    if len(data) > most_bytes:
        named = f"{path} " if place else ""
        raise error(Problem(place or str(path), f"{named}has more than {most_bytes:,} bytes", fix or "check the file"))
    return data
