"""One rank's part of a save: encode, hash, stream to the store, with patience."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from raypp.checkpoint.commit import ObjectRecord
from raypp.checkpoint.snapshot import Snapshot
from raypp.checkpoint.tensor_file import encode_header
from raypp.storage import ObjectStore, StoreError

_CHUNK_BYTES = 4 << 20


def upload_snapshot(
    store: ObjectStore,
    key: str,
    snapshot: Snapshot,
    rank: int,
    about: dict[str, Any],
    pause: Callable[[float], bool],
    tries: int = 4,
) -> ObjectRecord:
    """Writes a snapshot as one object; it is durable when this returns.

    Args:
        store: Where.
        key: Under which key.
        snapshot: What; must stay unreleased until this returns.
        rank: Whose it is.
        about: Goes into the file's header.
        pause: Called with the seconds before the next try; True means: give up.
        tries: How often it is tried, each wait twice as long as the one before, from 0.5 s.

    Raises:
        StoreError: The last try's failure.
    """
    data = snapshot.data()
    header = encode_header(snapshot.entries, data, about)
    size = len(header) + len(data)
    for left in reversed(range(tries)):
        digest = hashlib.sha256()
        try:
            store.put_stream(key, _chunks(header, data, digest), size)
        except StoreError:
            if not left or pause(0.5 * 2 ** (tries - 1 - left)):
                raise
            continue
        return ObjectRecord(key, size, digest.hexdigest(), rank, len(header), hashlib.sha256(header).hexdigest())
    raise AssertionError("unreachable")


def with_patience(action: Callable[[], None], pause: Callable[[float], bool], tries: int = 4) -> None:
    """Runs an action again when the store fails it, with growing pauses; other errors pass through."""
    for left in reversed(range(tries)):
        try:
            action()
            return
        except StoreError:
            if not left or pause(0.5 * 2 ** (tries - 1 - left)):
                raise


def _chunks(header: bytes, data: memoryview, digest: Any) -> Iterator[bytes | memoryview]:
    """Header and buffer in pieces, hashed on their way; the buffer is not copied."""
    digest.update(header)
    yield header
    for start in range(0, len(data), _CHUNK_BYTES):
        piece = data[start : start + _CHUNK_BYTES]
        digest.update(piece)
        yield piece
