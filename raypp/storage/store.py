"""What a store of objects promises, and how it says no.

A store is a flat map from keys to bytes. An object appears whole or not at all, and is never changed
in place. Keys are relative to the URL the store was opened at; `/` separates their parts. No key may
be a folder of another (`a` beside `a/b`): directories and some S3 servers cannot hold both.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raypp.errors import JobError, Problem, RayppError, UnreachableError
from raypp.failure_kinds import FailureKind

Data: TypeAlias = bytes | bytearray | memoryview
"""What can be stored. A memoryview must be contiguous and of bytes (`memoryview(x).cast("B")`)."""

_LONGEST_KEY = 900
_UNWELCOME = re.compile(r"[\x00-\x1f\x7f\\]")


class AlreadyExists(RayppError):
    """`put(…, if_absent=True)` found an object under the key; nothing was changed."""


class NotFound(RayppError):
    """There is no object under the key."""


class StoreError(UnreachableError):
    """The store answered with a failure that is neither of the two above (it may pass)."""

    failure_kind = FailureKind.STORE_DOWN


class ServerNotThere(StoreError):
    """Nothing answers at the store's endpoint."""


class BucketMissing(StoreError):
    """The bucket does not exist. raypp makes none by itself."""


class AccessRefused(StoreError):
    """The store knows the caller's key not, or does not allow what was asked."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        key: Relative to the store's URL.
        size: Bytes.
        modified: When it was written, seconds since 1970 by the store's clock.
    """

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Unfinished:
    """A write that was begun and has not ended: under way, or of a writer that died.

    Attributes:
        key: The object it is to become, relative to the store's URL.
        id: What the store calls it.
        started: When it was begun, seconds since 1970 by the store's clock. Compare it with nobody else's.
    """

    key: str
    id: str
    started: float


class ObjectStore(Protocol):
    """A store. All methods may be called from several threads at once; each process opens its own."""

    @property
    def url(self) -> str:
        """Where it was opened, in the form `open_store` takes, absolute."""
        ...

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        """Writes a whole object; it is durable when this returns.

        With `if_absent` at most one of any number of concurrent writers succeeds. A writer whose own
        earlier try was stored without its hearing of it counts as successful; therefore, data that
        decide between writers must differ between them (hold a nonce).

        Raises:
            AlreadyExists: `if_absent` and the key is there.
            StoreError: It could not be written, after retries.
        """
        ...

    def put_stream(self, key: str, chunks: Iterable[Data], size: int) -> None:
        """Writes an object of `size` bytes from pieces, without holding it in memory as a whole.

        A chunk must stay unchanged until the next one is asked for. Nothing appears under the key
        unless every chunk arrived. An object already there is replaced.

        Raises:
            ValueError: The chunks do not add up to `size`; nothing was stored.
            StoreError: It could not be written, after retries.
        """
        ...

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes `[start, end)` of an object, cut off at its end like a Python slice.

        Raises:
            NotFound: No such object.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object; None when there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix` (any string, not only a folder), by no promised order."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are not there are passed over."""
        ...

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Every write that was begun under a key that starts with `prefix` and has not ended."""
        ...

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Gives writes up: what they had stored goes, and they can no longer end. Those that ended are passed over."""
        ...

    def limitations(self) -> tuple[Problem, ...]:
        """What this store cannot do, found by trying it, and what is done instead. Remembered after the first call.

        For people: whoever begins a run tells them.
        """
        ...

    def probe(self) -> None:
        """Tries everything raypp needs on a small object of its own, which it removes again.

        Raises:
            BucketMissing, AccessRefused, ServerNotThere, StoreError: Told in words, with a fix.
        """
        ...


def check_key(key: str) -> str:
    """The key, when it is one a store can hold.

    Raises:
        JobError: Absolute, empty, with an empty, `.` or `..` part, a control character, or too long.
    """
    problem = ""
    if not key:
        problem = "is empty"
    elif len(key.encode()) > _LONGEST_KEY:
        problem = f"is longer than {_LONGEST_KEY} bytes"
    elif _UNWELCOME.search(key):
        problem = "holds a backslash or a control character"
    elif any(part in ("", ".", "..") for part in key.split("/")):
        problem = "is absolute, or has an empty, '.' or '..' part"
    if problem:
        raise JobError(
            Problem("", f"object key {key!r} {problem}", "use a relative key such as run/step-00000001/COMMIT")
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix, when keys can start with it; see `check_key`."""
    if prefix:
        check_key(prefix[:-1] if prefix.endswith("/") else prefix)
    return prefix


def probe_by_writing(store: ObjectStore) -> None:
    """Writes, reads, lists, conditionally rewrites and deletes one small object.

    Raises:
        StoreError: A step failed, or a write that must not replace an object did.
    """
    key = f".raypp-probe-{secrets.token_hex(8)}"
    data = secrets.token_bytes(16)
    store.put(key, data)
    try:
        there = store.get(key) == data and store.get(key, 4, 8) == data[4:8]
        if not there or [info.size for info in store.list(key)] != [len(data)]:
            raise StoreError(Problem(store.url, "does not give back what was written", "use another store"))
        try:
            store.put(key, secrets.token_bytes(16), if_absent=True)
        except AlreadyExists:
            return
        raise StoreError(
            Problem(
                store.url,
                "a write that must not replace an object did so: no commit is safe here",
                "use AWS S3, SeaweedFS, Ceph, MinIO, or a directory",
            )
        )
    finally:
        store.delete([key])
