"""Walks folders and finds the matches of globs, up to a number of entries; loops of links end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import translate
from glob import has_magic
from pathlib import Path

from raypp.errors import DataError, Problem, RayppError

MOST_ENTRIES = 500_000
"""Most files and folders that one search looks at."""

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

    def below(self, root: Path) -> Iterator[Path]:
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
                    yield Path(entry.path)

    def matches(self, pattern: str) -> Iterator[Path]:
        """Yields the paths that a pattern of `glob` with `recursive` matches; `**` ends at loops.

        Raises:
            RayppError: Of the given kind. The search looked at too many entries.
        """
        drive, rest = ("/", pattern.lstrip("/")) if pattern.startswith("/") else ("", pattern)
        for path in self._matches(drive, [part for part in rest.split("/") if part], pattern):
            if path and (not pattern.endswith("/") or os.path.isdir(path)):  # noqa: PTH112
                yield Path(path)

    def _matches(self, start: str, parts: list[str], pattern: str) -> Iterator[str]:
        if not parts:
            yield start
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            for path, folder in self._tree(start, pattern, ()):
                if folder or not rest:
                    yield from self._matches(path, rest, pattern)
        elif has_magic(first):
            fits = re.compile(translate(first)).match
            for entry in self._entries(start or ".", pattern):
                name = entry.name
                if fits(name) and (first.startswith(".") or not name.startswith(".")):
                    yield from self._matches(os.path.join(start, name), rest, pattern)  # noqa: PTH118 - "" stays ""
        elif os.path.lexists(path := os.path.join(start, first)):  # noqa: PTH118
            yield from self._matches(path, rest, pattern)

    def _tree(self, folder: str, pattern: str, above: tuple[_Folder, ...]) -> Iterator[tuple[str, bool]]:
        """Yields a folder and all below it that is not hidden, each with whether it is a folder."""
        try:
            status = os.stat(folder or ".")  # noqa: PTH116
        except OSError:
            return
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        yield folder, True
        for entry in self._entries(folder or ".", pattern):
            if entry.name.startswith("."):
                continue
            path = os.path.join(folder, entry.name)  # noqa: PTH118
            if _is_folder(entry, links=True):
                yield from self._tree(path, pattern, (*above, here))
            else:
                yield path, False

    def _entries(self, folder: str, searched: str) -> Iterator[os.DirEntry[str]]:
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


def _is_folder(entry: os.DirEntry[str], *, links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False
