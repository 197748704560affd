"""Lists the files below a folder, in which anything may lie: loops of links, FIFOs, odd names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from raypp.errors import Problem
from raypp.storage.store import MOST_LISTED, ForeignNames, ObjectInfo, StoreError, problem_of_key
from raypp.untrusted.files import kind_of

_MOST_LINKS = 1000


@dataclass(frozen=True)
class _Level:
    """A folder that is being listed: its key, its identity, and the names that are left, from the
    last to the first."""

    folder: str
    identity: tuple[int, int]
    names: list[str]


def walk(root: Path, prefix: str, without: str) -> Iterator[ObjectInfo]:
    """Yields every regular file whose path begins with the prefix.

    Links are followed, but not in a circle. Looks into no folder that can hold no such file: it may
    be another user's.

    Args:
        root: The store's folder.
        prefix: Beginning of the paths, relative to the root; may be empty.
        without: Entries of the root whose names begin so are left out.

    Raises:
        OSError: A folder cannot be read.
        StoreError: There are too many files, or links to folders.
    """
    folder = prefix.rpartition("/")[0]
    foreign = ForeignNames(str(root))
    entries = links = 0
    levels = _open(root, folder, (root / folder).stat())
    while levels:
        level = levels[-1]
        if not level.names:
            levels.pop()
            continue
        name = level.names.pop()
        key = f"{level.folder}/{name}" if level.folder else name
        if not key.startswith(prefix) or (not level.folder and name.startswith(without)):
            continue
        entries += 1
        if entries > MOST_LISTED:
            raise _too_many(root, folder, "files", MOST_LISTED)
        problem = problem_of_key(key)
        if problem:
            foreign.pass_over(key, problem)
            continue
        try:
            status = (root / key).stat()
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(key, status.st_size, status.st_mtime)
            elif not stat.S_ISDIR(status.st_mode):
                foreign.pass_over(key, f"is {kind_of(status.st_mode)}")
            elif any(one.identity == (status.st_dev, status.st_ino) for one in levels):
                foreign.pass_over(key, "is a link to a folder around it")
            else:
                links += (root / key).is_symlink()
                if links > _MOST_LINKS:
                    raise _too_many(root, folder, "links to folders", _MOST_LINKS)
                levels += _open(root, key, status)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted during the walk, or a link to nothing
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                raise
            foreign.pass_over(key, f"cannot be opened: {error.strerror}")


def _open(root: Path, folder: str, status: os.stat_result) -> list[_Level]:
    with os.scandir(root / folder) as found:
        names = [entry.name for entry in islice(found, MOST_LISTED + 1)]
    if len(names) > MOST_LISTED:
        raise _too_many(root, folder, "files", MOST_LISTED)
    return [_Level(folder, (status.st_dev, status.st_ino), sorted(names, reverse=True))]


def _too_many(root: Path, folder: str, what: str, most: int) -> StoreError:
    return StoreError(Problem(str(root / folder), f"holds more than {most:,} {what}", "use a folder of its own"))
