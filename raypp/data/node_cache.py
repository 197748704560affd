"""A cache of files that one process of a node creates and all map into memory.

It is at `$RAYPP_CACHE_DIR`, else `$XDG_CACHE_HOME/raypp`, else `~/.cache/raypp`. An entry is a
directory named by the digest of everything it was made from; it appears complete or not at all. You
may delete any entry while nothing runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raypp.errors import DataError, Problem
from raypp.untrusted.files import expand_home


def cache_directory() -> Path:
    """Returns the directory of this node's entries."""
    own = os.environ.get("RAYPP_CACHE_DIR")
    if own:
        return expand_home(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (expand_home(base) if base else Path.home() / ".cache") / "raypp"


def made_once(entry: Path, make: Callable[[Path], None]) -> Path:
    """Returns the directory `entry`; creates it first if it does not exist.

    If several processes ask at once, one creates it and the others wait. If that process dies,
    another one can create the entry.

    Args:
        entry: The entry's path, below `cache_directory()`.
        make: Fills the directory it is given.

    Raises:
        DataError: The cache cannot be written.
    """
    if entry.is_dir():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(f"{entry.name}.lock")):
            if not entry.is_dir():
                _make(entry, make)
    except OSError as error:
        raise DataError(
            Problem(
                "data.path",
                f"cannot write the cache at {entry.parent}: {error.strerror or error}",
                "free some space there, or set RAYPP_CACHE_DIR (resources.env) to a writable directory",
            )
        ) from error
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    unfinished = f".{entry.name}-"
    for left_over in entry.parent.glob(f"{unfinished}*"):  # of a dead process: this one holds the lock
        shutil.rmtree(left_over, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix=unfinished, dir=entry.parent))
    try:
        make(room)
        for file in room.iterdir():
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        room.chmod(0o755)
        room.rename(entry)
    except BaseException:
        shutil.rmtree(room, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file; the system releases it if the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
