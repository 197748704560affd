"""Walks folders and finds the matches of globs, up to a number of entries; loops of links end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache
from glob import has_magic
from pathlib import Path

from raypp.errors import DataError, Problem, RayppError

MOST_ENTRIES = 300_000
"""Most files and folders that one search looks at."""

_KERNEL = ("/proc", "/sys")
"""Folders that the kernel makes up count as empty: they hold no data, and looking is slow."""
_Folder = tuple[int, int]


class Search:
    """A search for files, which looks at no more than `most` entries.

    A folder that is not readable counts as empty, as for `glob`.

    Args:
        place: Where the user named the path, for errors.
        most: Most entries to look at.
        error: The kind of error to raise.
    """

    def __init__(self, place: str, most: int = MOST_ENTRIES, error: type[RayppError] = DataError) -> None:
        self._place, self._most, self._error = place, most, error
        self._seen = 0

    def below(self, root: Path) -> Iterator[str]:
        """Yields all files of a folder and of those in it. Follows no link to a folder.

        Raises:
            RayppError: Of the given kind. There are too many entries.
        """
        folders = [str(root)]
        while folders:
            for entry in self._entries(folders.pop(), str(root)):
                if _is_folder(entry, links=False):
                    folders.append(entry.path)
                else:
                    yield entry.path

    def matches(self, pattern: str) -> Iterator[str]:
        """Yields the paths that a pattern of `glob` with `recursive` matches; `**` ends at loops.

        Raises:
            RayppError: Of the given kind. The search looked at too many entries.
        """
        drive, rest = ("/", pattern.lstrip("/")) if pattern.startswith("/") else ("", pattern)
        for path in self._matches(drive, [part for part in rest.split("/") if part], pattern):
            if path and (not pattern.endswith("/") or os.path.isdir(path)):  # noqa: PTH112
                yield path

    def _matches(self, start: str, parts: list[str], pattern: str) -> Iterator[str]:
        if not parts:
            yield start
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            while rest[:1] == ["**"]:  # says the same again
                rest = rest[1:]
            tree = self._tree(start, pattern, files=not rest)
            yield from (found for path in tree for found in self._matches(path, rest, pattern)) if rest else tree
        elif has_magic(first):
            fits = _fits(first)
            for entry in self._entries(start or ".", pattern):
                name = entry.name
                if fits(name) and (first.startswith(".") or not name.startswith(".")):
                    yield from self._matches(os.path.join(start, name), rest, pattern)  # noqa: PTH118 - "" stays ""
        elif os.path.lexists(path := os.path.join(start, first)):  # noqa: PTH118
            yield from self._matches(path, rest, pattern)

    def _tree(self, root: str, pattern: str, *, files: bool) -> Iterator[str]:
        """Yields a folder and all below it that is not hidden: folders, and files if wanted."""
        folders: list[tuple[str, tuple[_Folder, ...]]] = [(root, ())]
        while folders:
            folder, above = folders.pop()
            try:
                status = os.stat(folder or ".")  # noqa: PTH116
            except OSError:
                continue
            here = (status.st_dev, status.st_ino)
            if here in above:
                continue
            yield folder
            within = (*above, here)
            start = os.path.join(folder, "")  # noqa: PTH118 - "" stays ""
            for entry in self._entries(folder or ".", pattern):
                name = entry.name
                if name.startswith("."):
                    continue
                if _is_folder(entry, links=True):
                    folders.append((start + name, within))
                elif files:
                    yield start + name

    def _entries(self, folder: str, searched: str) -> Iterator[os.DirEntry[str]]:
        if folder in _KERNEL:
            return
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._seen += 1
                    if self._seen > self._most:
                        what = f"{searched} has more than {self._most:,} files and folders to look at"
                        raise self._error(Problem(self._place, what, "name fewer: a folder or pattern with less below"))
                    yield entry
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return


@lru_cache(maxsize=256)
def _fits(pattern: str) -> Callable[[str], object]:
    return re.compile(translate(pattern)).match


def _is_folder(entry: os.DirEntry[str], *, links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False
