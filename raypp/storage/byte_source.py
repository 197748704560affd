"""A large object in memory, of which a store can send several places at once without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raypp.crc32 import crc32
from raypp.storage.rate_limit import Pace

_CHUNK_BYTES = 4 << 20


class MemorySource:
    """Concatenated buffers as one object, passed to `put_stream` instead of chunks.

    A store may read it in any order, in several threads, and again after a failure. It requests the
    beginning last if it can: the first buffer may not be ready yet, and a request for it then
    waits.

    Args:
        sizes: Bytes of each buffer.
        buffer: Returns the i-th buffer; called in any thread, any number of times. The buffers must
            not change until the upload ends.
        pace: Rate limit of the upload.
        crc32: (i, start, end, CRC-32 of what comes before) -> the CRC-32 continued over these bytes
            of the i-th buffer, for callers that have checksums already; None to compute it from the
            bytes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        buffer: Callable[[int], memoryview],
        pace: Pace | None = None,
        crc32: Callable[[int, int, int, int], int] | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self.size = sum(sizes)
        self.pace = pace or Pace()
        self._buffer = buffer
        self._crc32 = crc32 or self._read_crc32

    def views(self, start: int, end: int) -> list[memoryview]:
        """Returns the bytes [start, end) as views of the buffers."""
        return [self._buffer(index)[first:last] for index, first, last in self._places(start, end)]

    def crc32(self, start: int, end: int) -> int:
        """Returns the CRC-32 of the bytes [start, end)."""
        crc = 0
        for index, first, last in self._places(start, end):
            crc = self._crc32(index, first, last, crc)
        return crc

    def _places(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields buffer index, and first and last byte in that buffer."""
        begin = 0
        for index, size in enumerate(self.sizes):
            first, last = max(start - begin, 0), min(end - begin, size)
            if first < last:
                yield index, first, last
            begin += size

    def _read_crc32(self, index: int, start: int, end: int, before: int) -> int:
        return crc32(self._buffer(index)[start:end], before)

    def __iter__(self) -> Iterator[memoryview]:
        """Yields all bytes in order, in chunks, at the rate limit."""
        chunk = min(_CHUNK_BYTES, self.pace.piece_bytes) if self.pace.bytes_per_s else _CHUNK_BYTES
        for start in range(0, self.size, chunk):
            for view in self.views(start, min(start + chunk, self.size)):
                self.pace.take(len(view))
                yield view
