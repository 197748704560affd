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
from raypp.checkpoint.snapshot import Part, Snapshot
from raypp.checkpoint.tensor_file import BlockSums
from raypp.crc32 import crc32
from raypp.retry import Backoff
from raypp.storage import ObjectStore, StoreError
from raypp.storage.rate_limit import Abandoned, Pace
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
    sums = _Checksums(part, blocks, data, about, 1 if pace is not None and pace.bytes_per_s else _SUMMING)
    sizes = (part.writer.size(len(data), about), len(data))
    source = MemorySource(sizes, lambda index: data if index else sums.header(), pace, sums.crc32)
    try:
        RETRIES.call(lambda: store.put_stream(key, source, source.size), is_store_error, pause)
    except BaseException:
        sums.abandon()  # nothing may read the snapshot after this raises
        raise
    header = bytes(sums.header())
    return ObjectRecord(key, source.size, sums.sha256(), rank, len(header), hashlib.sha256(header).hexdigest())


def is_store_error(error: Exception) -> bool:
    return isinstance(error, StoreError)


class _Checksums:
    """The file's header with block checksums, and its SHA-256, computed during the upload."""

    def __init__(self, part: Part, blocks: BlockSums, data: memoryview, about: dict[str, Any], threads: int) -> None:
        self._writer, self._data, self._about = part.writer, data, about
        self._blocks, self._threads = blocks, threads
        self._header: bytes | None = None
        self._digest = hashlib.sha256()
        self._error: Exception | None = None
        self._has_header = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="raypp-checksums", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(self._threads, thread_name_prefix="raypp-checksums") as pool:
                list(pool.map(lambda share: self._blocks.compute(share, self._threads), range(self._threads)))
            self._header = self._writer.encode(self._blocks.digests(), self._about)
            self._has_header.set()
            self._digest.update(self._header)
            for start in range(0, len(self._data), _HASHED_AT_ONCE):
                if self._abandoned:
                    return
                self._digest.update(self._data[start : start + _HASHED_AT_ONCE])
        except Exception as error:  # noqa: BLE001 - raised where the result is needed
            self._error = error
        finally:
            self._has_header.set()

    def header(self) -> memoryview:
        """Waits for the header and returns it."""
        self._has_header.wait()
        if self._header is None:
            raise self._error or Abandoned()
        return memoryview(self._header)

    def crc32(self, index: int, start: int, end: int, before: int) -> int:
        """Returns a CRC-32 for `MemorySource`, whose buffer 0 is the header and 1 the data."""
        if index:
            return self._blocks.crc32(start, end, before)
        return crc32(self.header()[start:end], before)

    def sha256(self) -> str:
        """Waits for the SHA-256 of header and data and returns it in hex digits."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Stops the computation and waits until its thread has ended."""
        self._abandoned = True
        self._thread.join()
