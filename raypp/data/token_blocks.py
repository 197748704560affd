"""Ids and loss masks of a shard, read a block at a time and checked by their CRC-32."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.crc32 import crc32
from raypp.data.corpus import IdArray, Mask
from raypp.data.shard_format import BLOCK, mask_bytes
from raypp.data.source_files import SourceFile
from raypp.errors import DataError, Problem

DISK_BYTES = 1 << 30
"""Most bytes of one folder's blocks that a node keeps on disk."""
_IN_MEMORY = 256  # blocks
_THREADS = 16
_PRUNE_EVERY = 64 << 20


class BlockCache:
    """Blocks of all shards of one folder: the last used in memory, those of a store also on disk.

    The processes of a node share the files. A file that is damaged is read again from the store.

    Args:
        folder: Of the files; None for shards that are files themselves.
        most_bytes: Of the files; the oldest are removed.
    """

    def __init__(self, folder: Path | None, most_bytes: int = DISK_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._lock = threading.Lock()
        self._memory: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._room, self._written = _IN_MEMORY, 0
        self._pool: ThreadPoolExecutor | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._pool = ThreadPoolExecutor(_THREADS, "raypp-blocks")

    def block(self, blocks: Blocks, number: int) -> bytes:
        """Returns a block; raises DataError if it is damaged or cannot be read."""
        key = (blocks.name, number)
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        data = self._from_disk(blocks, number)
        if data is None:
            data = blocks.read(number)
            if self._folder is not None:
                self._to_disk(self._folder, key, data)
        with self._lock:
            self._memory[key] = data
            while len(self._memory) > self._room:
                self._memory.popitem(last=False)
        return data

    def fetch(self, blocks: Blocks, numbers: Sequence[int]) -> None:
        """Reads blocks of a store at once. Keeps all of them in memory."""
        if self._pool is not None:
            self._room = max(self._room, 2 * len(numbers))
            list(self._pool.map(lambda number: self.block(blocks, number), numbers))

    def _from_disk(self, blocks: Blocks, number: int) -> bytes | None:
        if self._folder is None:
            return None
        try:
            data = (self._folder / f"{blocks.name}-{number}").read_bytes()
        except OSError:
            return None
        return data if blocks.is_whole(number, data) else None

    def _to_disk(self, folder: Path, key: tuple[str, int], data: bytes) -> None:
        name = folder / f"{key[0]}-{key[1]}"
        unfinished = folder / f".{name.name}-{secrets.token_hex(4)}"
        try:
            unfinished.write_bytes(data)
            unfinished.rename(name)
        except OSError:  # a full disk only makes it slower
            with contextlib.suppress(OSError):
                unfinished.unlink()
        self._written += len(data)
        if self._written >= min(_PRUNE_EVERY, self._most // 4):
            self._written = 0
            self._prune(folder)

    def _prune(self, folder: Path) -> None:
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        left = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if left <= self._most * 3 // 4:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            left -= size


class Blocks:
    """The bytes of an object of a shard, read by blocks.

    Args:
        name: Of the blocks in the cache.
        file: Of the bytes.
        size: Their number.
        sums: CRC-32 of each block, uint32 `[blocks]`.
        cache: Of the folder.
    """

    def __init__(self, name: str, file: SourceFile, size: int, sums: NDArray[np.uint32], cache: BlockCache) -> None:
        self.name, self._file, self._size, self._sums, self._cache = name, file, size, sums, cache

    def between(self, begin: int, end: int) -> tuple[bytes, int]:
        """Returns the blocks that hold the bytes `[begin, end)`, and where these begin in them."""
        data = b"".join(self._cache.block(self, number) for number in _numbers(begin, end))
        return data, begin % BLOCK

    def fetch_bytes(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads the blocks of some bytes `[begin, end)` at once."""
        self._cache.fetch(self, sorted({number for span in spans for number in _numbers(*span)}))

    def is_whole(self, number: int, data: bytes) -> bool:
        """Whether these bytes are the block."""
        return crc32(data) == int(self._sums[number])

    def read(self, number: int) -> bytes:
        """Reads a block from the file or the store.

        Raises:
            DataError: It is damaged, or cannot be used.
        """
        start = number * BLOCK
        data = self._file.read(start, min(start + BLOCK, self._size))
        where = f"{self._file.name} at byte {start:,}"
        if not self.is_whole(number, data):
            fix = "write the shards again by `raypp data tokenize`, or copy them again"
            raise DataError(Problem(self._file.place, f"{where} is damaged (its CRC-32 differs)", fix))
        self.check(data, where)
        return data

    def check(self, data: bytes, where: str) -> None:
        """Raises DataError if a block that is whole cannot be used."""


class Shard(Blocks):
    """The ids of one shard, `[tokens]`; slices read blocks.

    Args:
        number: In its folder.
        file: Of the ids.
        tokens: Their number.
        dtype: Of the ids.
        sums: CRC-32 of each block, uint32 `[blocks]`.
        below: All ids must be below it.
        cache: Of the folder.
    """

    def __init__(
        self,
        number: int,
        file: SourceFile,
        tokens: int,
        dtype: np.dtype[Any],
        sums: NDArray[np.uint32],
        below: int,
        cache: BlockCache,
    ) -> None:
        super().__init__(str(number), file, tokens * dtype.itemsize, sums, cache)
        self._tokens, self._dtype, self._below = tokens, dtype, below

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, span: slice) -> IdArray:
        begin, end, _ = span.indices(self._tokens)
        width = self._dtype.itemsize
        data, start = self.between(begin * width, end * width)
        return np.frombuffer(data, self._dtype, max(0, end - begin), start)

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads the blocks of some spans `[begin, end)` at once."""
        width = self._dtype.itemsize
        self.fetch_bytes([(begin * width, end * width) for begin, end in spans])

    def check(self, data: bytes, where: str) -> None:
        highest = int(np.frombuffer(data, self._dtype).max())
        if highest >= self._below:
            fault = f"{where} has the id {highest}, but model.vocab_size is {self._below}"
            raise DataError(Problem(self._file.place, fault, "set model.vocab_size to more than the highest id"))


class ShardMask(Blocks):
    """Which ids of one shard carry loss, bool `[tokens]`; slices read blocks of bits.

    Args:
        number: In its folder.
        file: Of the bits.
        tokens: Their number.
        sums: CRC-32 of each block, uint32 `[blocks]`.
        cache: Of the folder.
    """

    def __init__(self, number: int, file: SourceFile, tokens: int, sums: NDArray[np.uint32], cache: BlockCache) -> None:
        super().__init__(f"loss-{number}", file, mask_bytes(tokens), sums, cache)
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, span: slice) -> Mask:
        begin, end, _ = span.indices(self._tokens)
        first, count = begin // 8, max(0, end - begin)
        data, start = self.between(first, mask_bytes(end))
        packed = np.frombuffer(data, np.uint8, mask_bytes(begin % 8 + count), start)
        return np.unpackbits(packed, bitorder="little")[begin % 8 : begin % 8 + count].view(np.bool_)

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads the blocks of some spans `[begin, end)` at once."""
        self.fetch_bytes([(begin // 8, mask_bytes(end)) for begin, end in spans])


def _numbers(begin: int, end: int) -> range:
    """Returns the numbers of the blocks with the bytes `[begin, end)`."""
    return range(begin // BLOCK, -(-end // BLOCK))
