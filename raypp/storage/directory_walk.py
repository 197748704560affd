"""Lists the files below a folder, in which anything may lie: loops of links, FIFOs, odd names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from raypp.errors import Problem
from raypp.storage.store import MOST_LISTED, ForeignNames, ObjectInfo, StoreError, problem_of_key
from raypp.untrusted.files import kind_of

_MOST_LINKS = 1000


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
    foreign = ForeignNames(str(root))
    entries = links = 0

    def below(folder: str, status: os.stat_result, around: tuple[tuple[int, int], ...] = ()) -> Iterator[ObjectInfo]:
        nonlocal entries, links
        around = (*around, (status.st_dev, status.st_ino))
        with os.scandir(root / folder) as listing:
            names = [entry.name for entry in islice(listing, MOST_LISTED + 1)]
        if len(names) > MOST_LISTED:
            raise _too_many(root, folder, "files", MOST_LISTED)
        for name in sorted(names):
            key = f"{folder}/{name}" if folder else name
            if not key.startswith(prefix) or (not folder and name.startswith(without)):
                continue
            entries += 1
            if entries > MOST_LISTED:
                raise _too_many(root, folder, "files", MOST_LISTED)
            if problem := problem_of_key(key):
                foreign.pass_over(key, problem)
                continue
            try:
                status = (root / key).stat()
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)
                elif not stat.S_ISDIR(status.st_mode):
                    foreign.pass_over(key, f"is {kind_of(status.st_mode)}")
                elif (status.st_dev, status.st_ino) in around:
                    foreign.pass_over(key, "is a link to a folder around it")
                else:
                    links += (root / key).is_symlink()
                    if links > _MOST_LINKS:
                        raise _too_many(root, folder, "links to folders", _MOST_LINKS)
                    yield from below(key, status, around)
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted during the walk, or a link to nothing
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                    raise
                foreign.pass_over(key, f"cannot be opened: {error.strerror}")

    first = prefix.rpartition("/")[0]
    yield from below(first, (root / first).stat())


def _too_many(root: Path, folder: str, content: str, most: int) -> StoreError:
    return StoreError(Problem(str(root / folder), f"holds more than {most:,} {content}", "use a folder of its own"))
