"""Appends lines to a store that cannot append.

A writer rewrites its part `FOLDER/WRITER-00001.jsonl` with more lines until it is full, then begins
the next. Bytes once written never change, so a reader that knows its position fetches only news.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from raypp.storage import AlreadyExists, NotFound, ObjectInfo, ObjectStore

_PART = re.compile(r"(?P<writer>[^/]+)-(?P<number>[0-9]{5,18})\.jsonl")
_READ_BYTES = 1 << 20
LONGEST_LINE = 4 << 20
"""Bytes; a longer line is not a record."""


class PartWriter:
    """Writes one writer's lines to one folder.

    `add` may be called from any thread, `write` from one thread at a time. `folder`: key prefix
    without the last slash: `kjv-pp2/history`. `writer`: name that differs between processes that
    write at the same time. Parts that an earlier process of the same name wrote are kept; their
    numbering continues. `notice`: returns the line to write in place of so many dropped lines."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        writer: str,
        part_bytes: int,
        notice: Callable[[int], bytes] = lambda dropped: b"",
    ) -> None:
        self._notice = notice
        self._dropped = 0
        self._store = store
        self._folder = folder
        self._writer = writer
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._part = bytearray()
        self._written = 0
        self._number: int | None = None

    def add(self, line: bytes) -> None:
        """Queues a line, which includes its line end; performs no I/O."""
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)

    def drop_oldest(self, keep_bytes: int) -> None:
        """Drops the oldest waiting lines until at most `keep_bytes` remain. The notice takes their
        place when the next line is written, so that it cannot be dropped."""
        with self._lock:
            while self._waiting and self._waiting_bytes > keep_bytes:
                self._waiting_bytes -= len(self._waiting.popleft())
                self._dropped += 1

    def write(self) -> None:
        """Makes all lines so far durable. Raises RayppError: the store failed; call again."""
        while True:
            self._fill()
            if len(self._part) == self._written:
                return
            self._put()
            self._written = len(self._part)
            if self._written >= self._part_bytes:
                assert self._number is not None
                self._number += 1
                self._part = bytearray()
                self._written = 0

    def _fill(self) -> None:
        with self._lock:
            if self._dropped and len(self._part) < self._part_bytes:
                self._part += self._notice(self._dropped)
                self._dropped = 0
            while self._waiting and len(self._part) < self._part_bytes:
                line = self._waiting.popleft()
                self._waiting_bytes -= len(line)
                self._part += line

    def _put(self) -> None:
        if self._number is None:
            self._number = self._next_number()
        while self._written == 0:
            # The part's first write must replace nothing: neither another process's part of this
            # name, nor this writer's own, which the store may have despite an error response.
            key = self._key(self._number)
            try:
                self._store.put(key, bytes(self._part), if_absent=True)
                return
            except AlreadyExists:
                stored = self._store.get(key)
                if self._part.startswith(stored):
                    self._written = len(stored)
                else:
                    self._number += 1
        self._store.put(self._key(self._number), bytes(self._part))

    def _next_number(self) -> int:
        last = 0
        for info in self._store.list(f"{self._folder}/{self._writer}-"):
            named = _PART.fullmatch(info.key.rpartition("/")[2])
            if named and named["writer"] == self._writer:
                last = max(last, int(named["number"]))
        return last + 1

    def _key(self, number: int) -> str:
        return f"{self._folder}/{self._writer}-{number:05d}.jsonl"


@dataclass(frozen=True)
class Line:
    """A complete line including its line end, the part it is in, and the offset behind it."""

    data: bytes
    part: str
    end: int


@dataclass
class Cursor:
    """A reader's position in each part, in bytes."""

    offsets: dict[str, int] = field(default_factory=dict)

    def pass_by(self, line: Line) -> None:
        """Marks this line, and the lines before it in its part, as read."""
        self.offsets[line.part] = line.end


def new_lines(store: ObjectStore, folder: str, cursor: Cursor) -> dict[str, Iterator[Line]]:
    """Returns the complete lines behind the cursor, by writer, in the order of writing. Does not
    read parts that have not grown. The iterators read as they are consumed. The caller advances the
    cursor when it has processed a line. An incomplete line stays for the next call. `folder`: as
    given to `PartWriter`. Raises RayppError: the store failed, here or in an iterator."""
    parts: dict[str, list[tuple[int, ObjectInfo]]] = {}
    for info in store.list(f"{folder}/"):
        named = _PART.fullmatch(info.key[len(folder) + 1 :])
        if named and info.size > cursor.offsets.get(info.key, 0):
            parts.setdefault(named["writer"], []).append((int(named["number"]), info))
    return {
        writer: _lines_of(store, [info for _, info in sorted(numbered, key=lambda pair: pair[0])], cursor)
        for writer, numbered in sorted(parts.items())
    }


def _lines_of(store: ObjectStore, parts: list[ObjectInfo], cursor: Cursor) -> Iterator[Line]:
    for part in parts:
        end, behind = cursor.offsets.get(part.key, 0), b""
        while (start := end + len(behind)) < part.size:
            try:
                data = store.get(part.key, start, min(start + _READ_BYTES, part.size))
            except NotFound:
                break  # deleted since it was listed
            if not data:
                break  # it is shorter than it was listed
            *lines, behind = (behind + data).split(b"\n")
            for line in lines:
                end += len(line) + 1
                yield Line(line + b"\n", part.key, end)
            if len(behind) > LONGEST_LINE:
                # One that is not of this form takes its place; the reader counts it as damaged.
                end += len(behind)
                yield Line(behind[:0], part.key, end)
                behind = b""
