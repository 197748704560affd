"""Paths, and files that others may have placed: regular ones only, up to a bound."""

import glob
import os
import re
import stat
from collections.abc import Iterator
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


def open_to_others(folder: Path) -> Path | None:
    """Returns the first folder in which other users can replace files, of this one and its parents.
    None if there is none, or if one above it lets only its owner in."""
    folder = folder.resolve()
    for one in [*reversed(folder.parents), folder]:
        seen = one.stat()
        writable = seen.st_mode & 0o022 and not seen.st_mode & stat.S_ISVTX
        if writable or seen.st_uid not in (0, os.geteuid()):
            return one
        if not seen.st_mode & 0o011:
            return None
    return None


def special_kind(path: Path) -> str | None:
    """Returns in words what kind of file a path is; None for regular files and folders. A link is
    followed; one that leads nowhere is special, too."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as cause:
        return f"a link that cannot be followed ({getattr(cause, 'strerror', cause)})" if path.is_symlink() else None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else kind_of(mode)


def kind_of(mode: int) -> str:
    """Returns in words what a file is that is not regular, from its `st_mode`."""
    return next((name for test, name in _KINDS if test(mode)), "not a regular file")


def check_own(folder: Path, error: type[RayppError], fix: str, user: int | None = None, bad: int = 0o002) -> None:
    """Checks that only root and a user can replace what a folder holds: others may have made it.
    `user`: the user; None: that of this process. `bad`: bits that its mode must not have, unless
    only owners may delete there. Raises RayppError: of the given kind. Others can."""
    status, fault = folder.stat(), ""
    if others := {status.st_uid, folder.lstat().st_uid} - {os.geteuid() if user is None else user, 0}:
        fault = f"belongs to user {min(others)}"
    elif status.st_mode & bad and not status.st_mode & stat.S_ISVTX:
        fault = f"has mode {stat.S_IMODE(status.st_mode):04o}"
    if fault:
        raise error(Problem(str(folder), f"{fault}: others could replace what this user writes there", fix))


def open_file(path: Path, error: type[RayppError] = DataError, place: str = "", fix: str = "") -> BinaryIO:
    """Opens a regular file for reading, in binary. Never waits, as opening a FIFO would. `path`:
    the file; a link is followed. `place`: where the user named it, for errors; empty: the path.
    Raises RayppError, of the given kind: it is missing, no regular file, or cannot be opened."""
    where = place or str(path)
    named = f"{path} " if place else ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error(Problem(where, f"{named}does not exist", fix or "check the path")) from None
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        fault = f"{named}cannot be opened: {reason}"
        raise error(Problem(where, fault, fix or "check the path and its permissions")) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(Problem(where, f"{named}is {kind_of(mode)}", fix or "use a regular file"))
    return os.fdopen(descriptor, "rb")


def read_file(
    path: Path, most_bytes: int, error: type[RayppError] = DataError, place: str = "", fix: str = ""
) -> bytes:
    """Reads a whole regular file of at most `most_bytes`. `path`: the file; a link is followed.
    `place`: where the user named it, for errors; empty: the path. Raises RayppError: of the given
    kind. It is missing, is not a regular file, cannot be read, or is too large."""
    with open_file(path, error, place, fix) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as cause:
            raise error(Problem(place or str(path), f"cannot be read: {cause.strerror}", fix)) from None
    if len(data) > most_bytes:
        named = f"{path} " if place else ""
        raise error(Problem(place or str(path), f"{named}has more than {most_bytes:,} bytes", fix or "check the file"))
    return data


def read_file_or_pipe(path: Path, most_bytes: int, error: type[RayppError] = DataError) -> bytes:
    """Reads a regular file as `read_file` does, or a pipe until its writers close it. For a path
    that the user gave on the command line, where a shell writes `/dev/fd/63` for `<(command)`.
    Raises RayppError: of the given kind, as for `read_file`."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116
            return read_file(path, most_bytes, error)
        with path.open("rb") as pipe:
            data = pipe.read(most_bytes + 1)
    except (OSError, ValueError):
        return read_file(path, most_bytes, error)  # which says why
    if len(data) > most_bytes:
        raise error(Problem(str(path), f"has more than {most_bytes:,} bytes", "check what writes to the pipe"))
    return data


_ANY_DEPTH = re.compile(r"(|.*?/)\*\*(|/.*)")


def expand_home(path: str | Path) -> Path:
    """Returns the path with `~` as the home directory. Leaves `~name` as it is if there is no such
    user, so that the error is that of a missing file."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for unknown users


def same_place(url: str, other: str) -> bool:
    """Returns whether two URLs of stores, or paths here, are one place. Links are followed."""
    if url == other or "://" in url + other:
        return url == other
    return os.path.realpath(url) == os.path.realpath(other)


def files_below(root: Path) -> Iterator[str]:
    """Yields the files of a folder and of folders in it, as `matches` does for `root/**`."""
    return (path for folder, names in _tree(str(root)) for path in names)


def matches(pattern: str) -> Iterator[str]:
    """Yields the paths that `glob` with `recursive` matches, but `**` follows no link to a folder
    that it finds without it, or above, so it ends and yields no file twice."""
    deep = _ANY_DEPTH.fullmatch(pattern)
    if deep is None:
        yield from glob.iglob(pattern)  # noqa: PTH207 - Path.glob matches hidden files
        return
    rest = deep[2].strip("/")
    for start in glob.iglob(deep[1]) if deep[1] else ["."]:  # noqa: PTH207
        for folder, names in _tree(start):
            if rest:
                yield from matches(os.path.join(glob.escape(folder), rest))  # noqa: PTH118
            else:
                yield from (path for path in (folder, *([] if deep[2] else names)) if path != ".")


def _tree(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yields a folder and all folders below it that are not hidden, each with its files."""
    top, seen = Path(root).resolve(), set[Path]()
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        folders[:] = [one for one in sorted(folders) if not one.startswith(".") and not _again(here / one, top, seen)]
        yield folder, [str(here / name) for name in names if not name.startswith(".")]


def _again(path: Path, top: Path, seen: set[Path]) -> bool:
    """Whether a folder is a link to what is walked without it: below or above `top`, or seen."""
    if not path.is_symlink():
        return False
    real = path.resolve()
    below = real.is_relative_to(top) and not any(part.startswith(".") for part in real.relative_to(top).parts)
    known = below or top.is_relative_to(real) or real in seen
    seen.add(real)
    return known
