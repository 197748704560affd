"""The interface of object stores, its errors, and how long requests to a failing one are retried.

A store is a flat map from keys to bytes. An object appears complete or not at all, and never
changes. Keys are relative to the store's URL. No key may be a folder of another (`a` and `a/b`).
"""

import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raypp.crc32 import crc32
from raypp.errors import JobError, Problem, RayppError, UnreachableError
from raypp.failure_kinds import FailureKind
from raypp.retry import Backoff
from raypp.storage.rate_limit import Pace
from raypp.untrusted.text import visible

log = logging.getLogger(__name__)

Data: TypeAlias = bytes | bytearray | memoryview
"""What can be stored. A memoryview must be contiguous and of bytes (`memoryview(x).cast("B")`)."""

MOST_WHOLE_BYTES = 64 << 20
"""An object that is read to its end without a given end must not be larger."""
MOST_LISTED = 1_000_000
"""A listing with more objects is an error."""

# Retries of requests to a failing store.
LONG_S = 60.0
"""For training processes: the server may be restarted meanwhile."""
SHORT_S = 8.0
"""While nothing listens at the endpoint: users want to know soon."""
WAIT_S = 600.0
"""For a run's last save, and between two attempts: somebody may make room, or mend the store."""
COMMAND_S = 30.0
"""For a command at a terminal."""
SILENCE_S = 30.0
"""Longest silence on a connection, unless it is set."""
COMMAND_SILENCE_S = 10.0
"""The same of a command."""
_FIRST_S = 0.2
_LONGEST_S = 8.0

_LONGEST_KEY = 900
_LONGEST_SHOWN = 100
_UNWELCOME = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


class AlreadyExists(RayppError):
    """`put(…, if_absent=True)` found an existing object; nothing was changed."""


class NotFound(RayppError):
    """No object exists under the key."""


class StoreError(UnreachableError):
    """The store failed in another way; the failure may be temporary."""

    failure_kind = FailureKind.STORE_DOWN


class ServerNotThere(StoreError):
    """Nothing answers at the store's endpoint."""


class BucketMissing(StoreError):
    """The bucket does not exist. raypp creates none by itself."""


class AccessRefused(StoreError):
    """The store does not know the caller's key, or denies the request."""


@dataclass(frozen=True)
class ObjectInfo:
    """Metadata of an object. `key`: relative to the store's URL. `size`: bytes. `modified`: when it
    was written, in seconds since 1970 by the store's clock."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Unfinished:
    """A write that has not ended: it is in progress, or its writer died.

    Attributes:
        key: The key of the object to be created, relative to the store's URL.
        id: The store's identifier of the write.
        started: When it began, in seconds since 1970 by the store's clock; compare with no other.
    """

    key: str
    id: str
    started: float


class ObjectStore(Protocol):
    """A store. All methods are thread-safe; each process opens its own store."""

    @property
    def url(self) -> str:
        """The absolute URL, in the form that `open_store` takes."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        """Writes a complete object; it is durable when this returns. With `if_absent`, at most one
        of any number of concurrent writers succeeds. A writer whose earlier try was stored while
        the response was lost counts as successful. Therefore, data that decide between writers must
        differ between them (contain a nonce). Raises AlreadyExists: `if_absent` and the key exists;
        StoreError: the write failed after retries."""

    def put_stream(self, key: str, chunks: Iterable[Data], size: int) -> None:
        """Writes an object of `size` bytes from chunks, without holding all of it in memory. A
        chunk must not change until the next one is requested. Nothing appears under the key unless
        every chunk arrived. An existing object is replaced. Raises ValueError: the chunks do not
        add up to `size`; nothing was stored; StoreError: the write failed after retries."""

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Reads the bytes `[start, end)` of an object, cut off at its end like a Python slice.
        Raises NotFound: the object does not exist; StoreError: the store failed, or without `end`
        there are more than `MOST_WHOLE_BYTES`."""

    def head(self, key: str) -> ObjectInfo | None:
        """Returns an object's metadata; None if it does not exist."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields every object whose key starts with `prefix` (any string), in no set order. Passes
        over what raypp cannot hold under that name, with a warning (see `ForeignNames`). Raises
        StoreError: the store failed, or there are more than `MOST_LISTED` objects."""

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; ignores keys that do not exist."""

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Yields every write under a key that starts with `prefix` that has not ended."""

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Aborts writes and removes what they stored. Ignores writes that have ended."""

    def limitations(self) -> tuple[Problem, ...]:
        """Probes what this store cannot do, and describes what raypp does instead. Remembers the
        result. It is meant to be shown to the user when a run begins."""

    def probe(self) -> None:
        """Checks everything that raypp needs with a small temporary object. Raises BucketMissing,
        AccessRefused, ServerNotThere, StoreError: with a fix."""


def check_key(key: str) -> str:
    """Returns the key if a store can hold it. Raises JobError: it is absolute, empty or too long,
    or has an empty, `.` or `..` part or a control character."""
    problem = problem_of_key(key)
    if problem:
        fix = "use a relative key such as run/step-00000001/COMMIT"
        raise JobError(Problem("", f"object key {key!r} {problem}", fix))
    return key


def problem_of_key(key: str) -> str:
    """Returns why a store cannot hold a key; empty if it can."""
    if not key:
        return "is empty"
    if len(key.encode(errors="surrogatepass")) > _LONGEST_KEY:
        return f"is longer than {_LONGEST_KEY} bytes"
    if _UNWELCOME.search(key):
        return "holds a backslash, a control character, or bytes that are not UTF-8"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "is absolute, or has an empty, '.' or '..' part"
    return ""


class ForeignNames:
    """Warns once of what a listing passes over: names that no store of raypp holds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._warned = False

    def pass_over(self, key: str, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: passes over %s, which %s", self._url, visible(repr(key[:_LONGEST_SHOWN])), problem)


def too_large(place: str, size: int) -> StoreError:
    fault = f"has {size:,} bytes; at most {MOST_WHOLE_BYTES:,} are read at once"
    return StoreError(Problem(place, fault, "check who wrote it"))


def check_prefix(prefix: str) -> str:
    """Returns the prefix if keys can start with it; see `check_key`."""
    if prefix:
        check_key(prefix[:-1] if prefix.endswith("/") else prefix)
    return prefix


def probe_by_writing(store: ObjectStore) -> None:
    """Writes, reads, lists, conditionally rewrites and deletes one small object. Raises StoreError:
    a request failed, or a conditional write replaced an object."""
    key = f".raypp-probe-{secrets.token_hex(8)}"
    data = secrets.token_bytes(16)
    store.put(key, data)
    try:
        readable = store.get(key) == data and store.get(key, 4, 8) == data[4:8]
        if not readable or [info.size for info in store.list(key)] != [len(data)]:
            raise StoreError(Problem(store.url, "does not return what was written", "use another store"))
        try:
            store.put(key, secrets.token_bytes(16), if_absent=True)
        except AlreadyExists:
            return
        fault = "a conditional write replaced an existing object: commits are not safe on this store"
        raise StoreError(Problem(store.url, fault, "use AWS S3, SeaweedFS, Ceph, MinIO, or a directory"))
    finally:
        store.delete([key])


_CHUNK_BYTES = 4 << 20


class MemorySource:
    """Concatenated buffers as one object, passed to `put_stream` instead of chunks. A store may
    read it in any order, in threads, and again. `buffers`: must not change meanwhile."""

    def __init__(self, buffers: Sequence[memoryview], pace: Pace | None = None) -> None:
        self.size = sum(map(len, buffers))
        self.pace = pace or Pace()
        self._buffers = buffers

    def views(self, start: int, end: int) -> list[memoryview]:
        """Returns the bytes [start, end) as views of the buffers."""
        views, begin = [], 0
        for buffer in self._buffers:
            views.append(buffer[max(start - begin, 0) : max(end - begin, 0)])
            begin += len(buffer)
        return [view for view in views if view]

    def crc32(self, start: int, end: int) -> int:
        """Returns the CRC-32 of the bytes [start, end)."""
        crc = 0
        for view in self.views(start, end):
            crc = crc32(view, crc)
        return crc

    def __iter__(self) -> Iterator[memoryview]:
        """Yields all bytes in order, in chunks, at the rate limit."""
        chunk = min(_CHUNK_BYTES, self.pace.piece_bytes) if self.pace.bytes_per_s else _CHUNK_BYTES
        for start in range(0, self.size, chunk):
            for view in self.views(start, min(start + chunk, self.size)):
                self.pace.take(len(view))
                yield view


_in_command = False


@contextmanager
def bounded_command() -> Iterator[None]:
    """Within it, stores that are opened without a given patience are those of a command."""
    global _in_command
    _in_command = True
    try:
        yield
    finally:
        _in_command = False


@dataclass(frozen=True)
class Patience:
    """Exponential backoff with jitter, so that many ranks do not retry at the same moment.
    `total_s`: no request begins later than this after the first failure. `unreachable_s`: the same
    if nothing listens at the endpoint at all. `silence_s`: longest silence on a connection, unless
    RAYPP_STORE_TIMEOUT_S sets it."""

    total_s: float = LONG_S
    unreachable_s: float = SHORT_S
    silence_s: float = SILENCE_S

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each retry, until `total_s` after the first `next`."""
        # Half of each pause is certain, so that retries do not hit an overloaded server at once.
        return Backoff(self.total_s, _FIRST_S, _LONGEST_S, jitter=0.5).pauses()


def patience_from_environment(unreachable_s: float = SHORT_S) -> Patience:
    """Returns the default, or RAYPP_STORE_PATIENCE_S in seconds for every kind of failure. Raises
    JobError: the value is not a number of seconds."""
    usual_s, silence_s = (COMMAND_S, COMMAND_SILENCE_S) if _in_command else (LONG_S, SILENCE_S)
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    if given is not None:
        return Patience(given, given, silence_s)
    return Patience(max(usual_s, unreachable_s), unreachable_s, silence_s)


def seconds_from_environment(name: str) -> float | None:
    """Reads a setting in seconds; None if it is not set. Raises JobError: it is no number."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 <= seconds < 1e6:
            raise ValueError
    except ValueError:
        raise JobError(Problem(name, f"{text!r} is not a number of seconds", f"set, for example, {name}=60")) from None
    return seconds
