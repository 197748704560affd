"""Which files a `data.path` means."""

from __future__ import annotations

import glob
from pathlib import Path

from raypp.errors import DataError, Problem
from raypp.storage import open_store


def local_files(path: str, endings: tuple[str, ...]) -> list[Path]:
    """The files of a path, a directory (those with one of the endings) or a glob, sorted by name.

    Raises:
        DataError: There is none.
    """
    place = Path(path).expanduser()
    if any(character in path for character in "*?["):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
        found = [file for file in found if file.is_file()]
    elif place.is_dir():
        found = sorted(file for file in place.rglob("*") if file.suffix in endings and file.is_file())
    else:
        found = [place] if place.is_file() else []
    if not found:
        wanted = f" with the ending {' or '.join(endings)}" if place.is_dir() else ""
        raise DataError(Problem("data.path", f"no file{wanted} at {path} on this node", "give a file, a directory or a glob that exists on every node"))
    return found


def read_all(path: str, endings: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Name and content of every file of a local path or an `s3://bucket/prefix`.

    Raises:
        DataError: There is none, or one is empty.
    """
    if path.startswith("s3://"):
        parent, _, name = path.rstrip("/").rpartition("/")
        store = open_store(parent)
        keys = sorted(info.key for info in store.list(name) if info.key == name or info.key.startswith(f"{name}/"))
        if not keys:
            raise DataError(Problem("data.path", f"no object at {path}", "give the URL of an object, or of a prefix with objects below it"))
        found = [(f"{parent}/{key}", store.get(key)) for key in keys]
    else:
        found = [(str(file), file.read_bytes()) for file in local_files(path, endings)]
    if not any(content.strip() for _, content in found):
        raise DataError(Problem("data.path", f"{path} is empty", "give files with text in them"))
    return found
