"""Paths of files and folders: `~`, globs, what lies below a folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

_ANY_DEPTH = re.compile(r"(|.*?/)\*\*(|/.*)")


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


def files_below(root: Path) -> Iterator[str]:
    """Yields all files of a folder and of those in it. Follows no link to a folder."""
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118 - quick for many files


def matches(pattern: str) -> Iterator[str]:
    """Yields the paths that `glob` with `recursive` matches, but `**` follows no link to a folder
    above, so it ends and yields no file twice."""
    deep = _ANY_DEPTH.fullmatch(pattern)
    if deep is None:
        yield from glob.iglob(pattern)  # noqa: PTH207 - Path.glob matches hidden files
        return
    rest = deep[2].strip("/")
    for start in glob.iglob(deep[1]) if deep[1] else ["."]:  # noqa: PTH207
        for path in _tree(start, files=not deep[2]):
            if rest:
                yield from matches(os.path.join(glob.escape(path), rest))  # noqa: PTH118
            elif path != ".":
                yield path


def _tree(root: str, *, files: bool) -> Iterator[str]:
    """Yields a folder and all folders below it that are not hidden, with their files if wanted."""
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_up(here / name)]
        yield folder
        yield from (str(here / name) for name in names if files and not name.startswith("."))


def _leads_up(path: Path) -> bool:
    return path.is_symlink() and any(path.samefile(above) for above in path.absolute().parents)
