"""Lines appended to a store that cannot append.

A writer's lines go into part objects `FOLDER/WRITER-00001.jsonl`, `…-00002.jsonl`. The current part is
rewritten, always longer, until it is full; then the next one starts. So a part's bytes never change once
written, only more follow, and a reader that remembers how far it read fetches only what is new.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from raypp.storage import AlreadyExists, NotFound, ObjectStore

_PART = re.compile(r"^(?P<writer>[^/]+)-(?P<number>\d{5,})\.jsonl$")


class PartWriter:
    """One writer's lines in one folder. `add` may be called from any thread; `write` from one at a time.

    Args:
        folder: Key prefix without the last slash: `kjv-pp2/history`.
        writer: Differs between processes that write at the same time. Parts an earlier process of the same name
            left are kept: numbering goes on after them.
        part_bytes: A part that has reached this is not touched again.
    """

    def __init__(self, store: ObjectStore, folder: str, writer: str, part_bytes: int) -> None:
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

    @property
    def waiting_bytes(self) -> int:
        """Bytes of lines no write has taken up yet."""
        return self._waiting_bytes

    def add(self, line: bytes) -> None:
        """Takes a line, with its line end; no input or output happens here."""
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)

    def add_first(self, line: bytes) -> None:
        """Takes a line that goes before all that wait."""
        with self._lock:
            self._waiting.appendleft(line)
            self._waiting_bytes += len(line)

    def drop_oldest(self, keep_bytes: int) -> int:
        """Forgets the oldest waiting lines until at most `keep_bytes` are left; returns how many lines."""
        dropped = 0
        with self._lock:
            while self._waiting and self._waiting_bytes > keep_bytes:
                self._waiting_bytes -= len(self._waiting.popleft())
                dropped += 1
        return dropped

    def write(self) -> None:
        """Makes every line added so far durable. Does nothing when all are.

        Raises:
            RayppError: From the store. Nothing is lost: the next call tries again.
        """
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
            while self._waiting and len(self._part) < self._part_bytes:
                line = self._waiting.popleft()
                self._waiting_bytes -= len(line)
                self._part += line

    def _put(self) -> None:
        if self._number is None:
            self._number = self._next_number()
        while self._written == 0:
            # The part's first write must not replace anybody's: another process of this name, or this
            # one's own write that was stored although the store answered with an error.
            key = self._key(self._number)
            try:
                self._store.put(key, bytes(self._part), if_absent=True)
                return
            except AlreadyExists:
                there = self._store.get(key)
                if self._part.startswith(there):
                    self._written = len(there)
                else:
                    self._number += 1
        self._store.put(self._key(self._number), bytes(self._part))

    def _next_number(self) -> int:
        last = 0
        for info in self._store.list(f"{self._folder}/{self._writer}-"):
            named = _PART.match(info.key.rpartition("/")[2])
            if named and named["writer"] == self._writer:
                last = max(last, int(named["number"]))
        return last + 1

    def _key(self, number: int) -> str:
        return f"{self._folder}/{self._writer}-{number:05d}.jsonl"


@dataclass(frozen=True)
class Line:
    """One whole line, with its line end; its part, and the byte behind it."""

    data: bytes
    part: str
    end: int


@dataclass
class Cursor:
    """How far a reader has come in each part, in bytes."""

    offsets: dict[str, int] = field(default_factory=dict)

    def pass_by(self, line: Line) -> None:
        """Marks the line, and those before it in its part, as read."""
        self.offsets[line.part] = line.end


def new_lines(store: ObjectStore, folder: str, cursor: Cursor) -> dict[str, Iterator[Line]]:
    """The whole lines behind the cursor, by writer, each writer's in the order it wrote them.

    Parts that have not grown are not read. The iterators read as they are consumed. The caller moves the
    cursor on once it has done its work with a line; a line that is not whole yet stays for the next call.

    Args:
        folder: As given to `PartWriter`.

    Raises:
        RayppError: From the store, here or from an iterator.
    """
    parts: dict[str, list[tuple[int, str]]] = {}
    for info in store.list(f"{folder}/"):
        named = _PART.match(info.key[len(folder) + 1 :])
        if named and info.size > cursor.offsets.get(info.key, 0):
            parts.setdefault(named["writer"], []).append((int(named["number"]), info.key))
    return {
        writer: _lines_of(store, [(key, cursor.offsets.get(key, 0)) for _, key in sorted(numbered)])
        for writer, numbered in sorted(parts.items())
    }


def _lines_of(store: ObjectStore, parts: list[tuple[str, int]]) -> Iterator[Line]:
    for part, end in parts:
        try:
            data = store.get(part, start=end)
        except NotFound:
            continue  # deleted since it was listed
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            yield Line(line, part, end)
