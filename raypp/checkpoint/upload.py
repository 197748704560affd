"""Uploads one rank's part of a save from the snapshot's memory: concurrent checksums, retries.

An upload takes at least one SHA-256 pass: the header holds every CRC-32 and is hashed first, so it
is sent last, and the sum is that of the whole object. A hash of hashes would run in parallel, but
only raypp could check it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raypp.checkpoint.commit import ObjectRecord
from raypp.checkpoint.snapshot import Snapshot
from raypp.crc32 import crc32
from raypp.retry import Backoff
from raypp.storage import ObjectStore, StoreError
from raypp.storage.rate_limit import Pace
from raypp.storage.store import MemorySource

_HASHED_AT_ONCE = 4 << 20
RETRIES = Backoff(math.inf, first_s=0.5, longest_s=2.0, tries=4)
"""Of an upload and of a commit; the store's own client has retried each request before."""
_SUMMING = 3
"""Threads that compute the blocks' CRC-32, for which the SHA-256 waits. Under a cap there is time:
one, which leaves the other cores to the training."""


def upload_snapshot(
    store: ObjectStore,
    key: str,
    snapshot: Snapshot,
    rank: int,
    about: dict[str, Any],
    pause: Callable[[float], bool],
    pace: Pace | None = None,
) -> ObjectRecord:
    """Writes a snapshot's first object, which is durable when this returns.

    Args:
        snapshot: The snapshot; must not be released before this returns.
        rank: The rank whose state it is.
        pause: Called with the seconds before the next try; returns True to give up.

    Raises:
        StoreError: The last try failed.
    """
    part, blocks = snapshot.parts[0], snapshot.sums(0)
    data = snapshot.data()[part.begin : part.begin + part.size]
    threads = 1 if pace is not None and pace.bytes_per_s else _SUMMING
    abandoned = threading.Event()
    # Its end waits for its threads: nothing may read the snapshot after this returns or raises.
    with ThreadPoolExecutor(threads + 1, thread_name_prefix="raypp-checksums") as pool:
        shares = [pool.submit(blocks.compute, share, threads) for share in range(threads)]

        def encode() -> bytes:
            for share in shares:
                share.result()
            return part.writer.encode(blocks.digests(), about)

        def hash_all() -> str:
            digest = hashlib.sha256(header.result())
            for start in range(0, len(data), _HASHED_AT_ONCE):
                if abandoned.is_set():
                    break
                digest.update(data[start : start + _HASHED_AT_ONCE])
            return digest.hexdigest()

        def crc_of(index: int, start: int, end: int, before: int) -> int:
            return blocks.crc32(start, end, before) if index else crc32(header.result()[start:end], before)

        header = pool.submit(encode)
        sha256 = pool.submit(hash_all)
        sizes = (part.writer.size(len(data), about), len(data))
        source = MemorySource(sizes, lambda index: data if index else memoryview(header.result()), pace, crc_of)
        try:
            RETRIES.call(lambda: store.put_stream(key, source, source.size), is_store_error, pause)
        except BaseException:
            abandoned.set()
            raise
        head = header.result()
        return ObjectRecord(key, source.size, sha256.result(), rank, len(head), hashlib.sha256(head).hexdigest())


def is_store_error(error: Exception) -> bool:
    return isinstance(error, StoreError)
