"""Uploads one rank's part of a save from the snapshot's memory, with retries.

The header holds a CRC-32 of every block, so these are computed first. The SHA-256 of the whole
object takes much longer and is computed meanwhile. A hash of hashes would run in parallel, but only
raypp could check it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raypp.checkpoint.commit import ObjectRecord
from raypp.checkpoint.snapshot import Snapshot
from raypp.storage import ObjectStore
from raypp.storage.rate_limit import Pace
from raypp.storage.store import MemorySource

_HASHED_AT_ONCE = 4 << 20


def upload_snapshot(
    store: ObjectStore,
    key: str,
    snapshot: Snapshot,
    about: dict[str, Any],
    repeat: Callable[[Callable[[], None]], None],
    pace: Pace,
) -> ObjectRecord:
    """Writes a snapshot's first object, which is durable when this returns.

    Args:
        snapshot: The snapshot; must not be released before this returns.
        about: What its header says of its writer: run, step, attempt, rank.
        repeat: Calls a function again while it fails and that may help.

    Raises:
        StoreError: The last try failed.
    """
    part = snapshot.parts[0]
    data = snapshot.data()[part.begin : part.begin + part.size]
    header = part.writer.encode(snapshot.digests(0), about)
    abandoned = threading.Event()

    def hash_all() -> str:
        digest = hashlib.sha256(header)
        for start in range(0, len(data), _HASHED_AT_ONCE):
            if abandoned.is_set():
                break
            digest.update(data[start : start + _HASHED_AT_ONCE])
        return digest.hexdigest()

    # Its end waits for its thread: nothing may read the snapshot after this returns or raises.
    with ThreadPoolExecutor(1, thread_name_prefix="raypp-checksum") as pool:
        sha256 = pool.submit(hash_all)
        source = MemorySource((memoryview(header), data), pace)
        try:
            repeat(lambda: store.put_stream(key, source, source.size))
        except BaseException:
            abandoned.set()
            raise
        sums = sha256.result(), hashlib.sha256(header).hexdigest()
        return ObjectRecord(key, source.size, sums[0], about["rank"], len(header), sums[1])
