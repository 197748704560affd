"""The directory for this user's raypp files on this machine: `$RAYPP_HOME`, or `~/.raypp`."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from raypp.errors import JobError, Problem
from raypp.untrusted.files import expand_home


def raypp_home() -> Path:
    """Returns the directory of this user's raypp files, which may not exist yet."""
    return expand_home(os.environ.get("RAYPP_HOME") or "~/.raypp").absolute()


def private_directory(path: Path) -> Path:
    """Creates a directory that only its owner can read; returns it."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, atomically."""
    private_directory(path.parent)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes of this machine; it ends with the process."""
    private_directory(path.parent)
    with _writing(path):
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "set RAYPP_HOME to a writable directory"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space there, or set RAYPP_HOME to a directory on another disk"
        fault = f"cannot write {path}: {error.strerror or error}"
        raise JobError(Problem("RAYPP_HOME", fault, fix)) from None
