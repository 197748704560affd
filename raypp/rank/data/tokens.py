"""Token ids: shards of `raypp data tokenize`, or one-dimensional `.npy` files made elsewhere.

Arrays are mapped, never loaded whole; in `.npy` files the end id separates documents, found in one
pass that the node's cache keeps. Shards are read by blocks, each checked by its CRC-32.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.crc32 import crc32
from raypp.errors import DataError, Problem
from raypp.kinds import SourceKind
from raypp.rank.data.corpus import Corpus, IdArray, Mask
from raypp.rank.data.shard_format import (
    BLOCK,
    MANIFEST,
    MANIFEST_BOUNDS,
    Manifest,
    around_of,
    blocks_of,
    mask_bytes,
    shard_name,
)
from raypp.rank.data.source_files import SourceFile, find_files
from raypp.rank.data.tokenised import IN_MEMORY_BYTES, Request, entry_name
from raypp.storage.node_cache import cache_directory, made_once, map_array, own_folder, read_meta, read_offsets
from raypp.untrusted.documents import parse_as

KIND = SourceKind("tokens", "token ids, already encoded", position=3, endings=(".npy", ".ids"), ids="tokenizer")

_CHUNK = 4 << 20  # ids


def read(request: Request) -> Corpus:
    """Reads all documents of all files, in order of file name; the end of a file ends a document.
    Raises DataError: no file, not such an array, an id beyond the model's, a document without a
    token, or shards that are unfinished or damaged."""
    files = find_files(request.path, KIND.endings, request.place)
    ours = [file for file in files if file.name.endswith(ENDING)]
    if ours:
        return open_shards(request, ours, manifest_of(request.path, ours, request.place))
    shards = [_mapped(file, request) for file in files]
    if sum(file.size for file in files) <= IN_MEMORY_BYTES:
        offsets, digest = _scan(files, shards, request)
        return Corpus(tuple(shards), offsets, digest)

    def make(room: Path) -> None:
        offsets, digest = _scan(files, shards, request)
        np.save(room / "offsets.npy", offsets)
        (room / "meta.json").write_text(json.dumps({"digest": digest}), encoding="utf-8")

    name = f"{entry_name(request, files)}-{request.tokenizer.eos_id}-{request.vocab_size}"
    entry = made_once(cache_directory() / "tokens" / name, make)
    digest = read_meta(entry, request.place)["digest"]
    return Corpus(tuple(shards), read_offsets(entry, sum(map(len, shards)), request.place), digest)


def _mapped(file: SourceFile, request: Request) -> IdArray:
    ids = map_array(_fetched(file) if file.store is not None else Path(file.key), request.place, file.name)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        fault = f"{file.name} holds {ids.dtype} of shape {list(ids.shape)}"
        raise DataError(Problem(request.place, fault, "use a one-dimensional, non-empty array of integers"))
    return ids


def _fetched(file: SourceFile) -> Path:
    """Copies an object to a file on this node, because only a file can be memory-mapped."""
    name = hashlib.sha256(json.dumps([file.name, file.size, file.modified]).encode()).hexdigest()[:32]

    def make(room: Path) -> None:
        with (room / "object.npy").open("wb") as sink:
            for chunk in file.chunks():
                sink.write(chunk)

    return made_once(cache_directory() / "objects" / name, make) / "object.npy"


def _scan(files: Sequence[SourceFile], shards: Sequence[IdArray], request: Request) -> tuple[NDArray[np.int64], str]:
    """Returns the start of each document, and a digest of all ids."""
    ends, digest = array("q", [0]), hashlib.sha256()
    for file, shard in zip(files, shards, strict=True):
        base, before = ends[-1], len(ends)
        for start in range(0, len(shard), _CHUNK):
            chunk = np.asarray(shard[start : start + _CHUNK])
            _check_ids(chunk, start, file, request)
            digest.update(np.ascontiguousarray(chunk, dtype=np.int64).data)
            borders = np.flatnonzero(chunk == request.tokenizer.eos_id) + (base + start + 1)
            ends.frombytes(borders.astype(np.int64).tobytes())
        if ends[-1] != base + len(shard):
            ends.append(base + len(shard))
        _check_documents(np.array(ends[before - 1 :]) - base, shard, file, request)
    offsets = np.frombuffer(ends, dtype=np.int64)
    digest.update(offsets.data)
    return offsets, digest.hexdigest()[:16]


def _check_documents(borders: NDArray[np.int64], shard: IdArray, file: SourceFile, request: Request) -> None:
    lone = np.flatnonzero(np.diff(borders) == 1)
    lone = lone[shard[borders[lone]] == request.tokenizer.eos_id]
    if len(lone):
        fault = f"{file.name}: document {int(lone[0])} (at [{int(borders[lone[0]])}]) is a document without a token"
        raise DataError(Problem(request.place, fault, "remove the repeated end id"))


def _check_ids(chunk: IdArray, start: int, file: SourceFile, request: Request) -> None:
    wrong = np.flatnonzero((chunk < 0) | (chunk >= request.vocab_size))
    if len(wrong):
        index = int(wrong[0])
        fault = f"{file.name}[{start + index}] is {int(chunk[index])}, but model.vocab_size is {request.vocab_size}"
        fix = "set model.vocab_size to more than the highest id" if chunk[index] >= 0 else "ids start at 0"
        raise DataError(Problem(request.place, fault, fix))


ENDING, LOSS = ".ids", ".loss"
_MOST_INDEX = 2 << 30


def open_shards(request: Request, files: Sequence[SourceFile], manifest_file: SourceFile) -> Corpus:
    """Opens a folder of shards. The index comes to the node's cache; ids are read when needed.
    `files`: its `.ids` files. Raises DataError: unfinished, damaged, or another tokenizer's."""
    place = request.place
    if manifest_file.size > MANIFEST_BOUNDS.size:
        raise DataError(Problem(place, f"{manifest_file.name} has {manifest_file.size:,} bytes", "check who wrote it"))
    document = b"".join(manifest_file.chunks())
    fix = "write the shards again by `raypp data tokenize`"
    manifest = parse_as(Manifest, document, f"{place}: {manifest_file.name}", MANIFEST_BOUNDS, DataError, fix)
    plan, tokenizer = manifest.plan, request.tokenizer
    if (plan.tokenizer, plan.end_id) != (tokenizer.identity, tokenizer.eos_id):
        theirs, ours = f"{plan.tokenizer}, end id {plan.end_id}", f"{tokenizer.identity}, end id {tokenizer.eos_id}"
        fault = f"{manifest_file.name} was written with another tokenizer ({theirs}; not {ours})"
        raise DataError(Problem("data.tokenizer", fault, "use that tokenizer, or tokenise again with this one"))
    if plan.around != (around := around_of(tokenizer)):
        theirs, ours = (
            tokenizer.shown([one for part in ids for one in part]) or "nothing" for ids in (plan.around, around)
        )
        fault = f"{manifest_file.name} has {theirs} around each text, but the job's tokenizer adds {ours}"
        fix = "set data.add_bos: false" if not plan.around else "leave data.add_bos out"
        raise DataError(Problem("data.add_bos", fault, f"{fix}, or tokenise again"))
    width = np.dtype(plan.dtype).itemsize
    tokens = [record.tokens for record in manifest.shards]
    if not tokens or manifest.tokens != sum(tokens):
        raise DataError(Problem(place, f"{manifest_file.name} does not add up", fix))
    shard_files = _objects(files, ENDING, [count * width for count in tokens], manifest_file)
    masks: list[SourceFile] = []
    if plan.masks:
        there = _found_beside(manifest_file)
        masks = _objects(there, LOSS, [mask_bytes(count) for count in tokens], manifest_file)

    name = hashlib.sha256(document).hexdigest()[:32]

    def make(room: Path) -> None:
        _copy_index(room, manifest, shard_files, place)

    entry = made_once(cache_directory() / "shards" / name, make)
    offsets = read_offsets(entry, manifest.tokens, place)
    sums = map_array(entry / "sums.npy", place, fix=f"delete {entry}")
    ids_blocks = [blocks_of(count * width) for count in tokens]
    mask_blocks = [blocks_of(file.size) for file in masks]
    if sum(ids_blocks + mask_blocks) != len(sums) or len(offsets) != manifest.documents + 1:
        raise DataError(Problem(place, f"{entry} is not the index of {manifest_file.name}", f"delete {entry}"))
    remote = any(file.store is not None for file in shard_files)
    cache = BlockCache(cache_directory() / "blocks" / name if remote else None)
    shards, loss, at = [], [], 0
    for number, (file, count, blocks) in enumerate(zip(shard_files, tokens, ids_blocks, strict=True)):
        own, at = sums[at : at + blocks], at + blocks
        shards.append(Shard(number, file, count, np.dtype(plan.dtype), own, request.vocab_size, cache))
        if plan.masks:
            own, at = sums[at : at + mask_blocks[number]], at + mask_blocks[number]
            loss.append(ShardMask(f"loss-{number}", masks[number], count, own, cache))
    carries = tuple(loss) if plan.masks else None
    return Corpus(tuple(shards), offsets, manifest.digest, loss=carries, template=plan.template)


def _found_beside(manifest: SourceFile) -> list[SourceFile]:
    """Returns the files of loss masks in the folder of a manifest; none if there are none."""
    try:
        return find_files(manifest.name.rpartition("/")[0], (LOSS,), manifest.place)
    except DataError:
        return []


def _objects(files: Sequence[SourceFile], ending: str, sizes: list[int], manifest: SourceFile) -> list[SourceFile]:
    """Returns the file of each shard, in order."""
    by_name = {file.key.rpartition("/")[2]: file for file in files}
    objects = []
    for number, size in enumerate(sizes):
        name = f"{shard_name(number)}{ending}"
        file = by_name.get(name)
        if file is None or file.size != size:
            has = "is missing" if file is None else f"has {file.size:,} bytes, not {size:,}"
            fault = f"{manifest.name} names {name}, which {has}"
            raise DataError(Problem(manifest.place, fault, "copy it again, or write the shards again"))
        objects.append(file)
    return objects


def _copy_index(room: Path, manifest: Manifest, files: Sequence[SourceFile], place: str) -> None:
    """Writes the offsets of all documents and the checksums of all blocks to the node's cache."""
    width, tokens, sums = np.dtype(manifest.plan.dtype).itemsize, 0, []
    masks = manifest.plan.masks
    offsets = np.lib.format.open_memmap(
        room / "offsets.npy", mode="w+", dtype=np.int64, shape=(sum(one.documents for one in manifest.shards) + 1,)
    )
    at = 1
    for file, record in zip(files, manifest.shards, strict=True):
        name = f"{file.name.removesuffix(ENDING)}.index"
        blocks = blocks_of(record.tokens * width) + (blocks_of(mask_bytes(record.tokens)) if masks else 0)
        size = 8 * record.documents + 4 * blocks
        problem = DataError(Problem(place, f"{name} is damaged", "copy it again, or write the shards again"))
        if size > _MOST_INDEX:
            raise problem
        index = SourceFile(name, size, 0, file.store, f"{file.key.removesuffix(ENDING)}.index", place).read(0, size)
        if len(index) != size or hashlib.sha256(index).hexdigest() != record.index_sha256:
            raise problem
        ends = np.frombuffer(index, "<i8", record.documents)
        if ends[-1] != record.tokens or int(ends[0]) < 1 or (np.diff(ends) < 1).any():
            raise problem
        offsets[at : at + record.documents] = ends + tokens
        sums.append(np.frombuffer(index, "<u4", offset=8 * record.documents).astype(np.uint32))
        at, tokens = at + record.documents, tokens + record.tokens
    offsets.flush()
    np.save(room / "sums.npy", np.concatenate(sums))


def manifest_of(path: str, files: Sequence[SourceFile], place: str) -> SourceFile:
    """Returns the manifest of `.ids` files. Raises DataError: several folders, or no manifest."""
    folders = {file.name.rpartition("/")[0] for file in files}
    if len(folders) > 1:
        fault = f"{path} has shards in {len(folders)} folders"
        raise DataError(Problem(place, fault, "name one of them, or mix them by kind: mixture"))
    (folder,) = folders
    try:
        (manifest,) = find_files(f"{folder}/{MANIFEST}", (".json",), place)
    except DataError:
        fault = f"{folder} has no {MANIFEST}: the shards are not finished"
        raise DataError(Problem(place, fault, "run `raypp data tokenize` again: it continues")) from None
    return manifest


DISK_BYTES = 1 << 30
"""Most bytes of one folder's blocks that a node keeps on disk."""
_IN_MEMORY = 256  # blocks
_THREADS = 16
_PRUNE_EVERY = 64 << 20


class BlockCache:
    """Blocks of all shards of one folder: the last used in memory, those of a store also on disk. A
    node's processes share them. A damaged file is read again from the store. `folder`: of the
    files; None: shards are files themselves. `most_bytes`: of the files; the oldest are removed."""

    def __init__(self, folder: Path | None, most_bytes: int = DISK_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._lock = threading.Lock()
        self._memory: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._room, self._written = _IN_MEMORY, 0
        self._pool: ThreadPoolExecutor | None = None
        if folder is not None:
            own_folder(folder)
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
    """What one object of a shard holds of each token, `[tokens]`; slices read blocks. `name`: of
    its blocks in `cache`. `file`: of the bytes. `sums`: CRC-32 of each block, uint32 `[blocks]`."""

    def __init__(self, name: str, file: SourceFile, tokens: int, sums: NDArray[np.uint32], cache: BlockCache) -> None:
        self.name, self._file, self._tokens, self._sums, self._cache = name, file, tokens, sums, cache

    def __len__(self) -> int:
        return self._tokens

    def bytes_of(self, begin: int, end: int) -> tuple[int, int]:
        """Returns where the bytes of the tokens `[begin, end)` begin and end."""
        raise NotImplementedError

    def between(self, begin: int, end: int) -> tuple[bytes, int]:
        """Returns the blocks of the tokens `[begin, end)`, and where their bytes begin in them."""
        data = b"".join(self._cache.block(self, number) for number in self._numbers(begin, end))
        return data, self.bytes_of(begin, end)[0] % BLOCK

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads the blocks of some spans `[begin, end)` at once."""
        self._cache.fetch(self, sorted({number for span in spans for number in self._numbers(*span)}))

    def is_whole(self, number: int, data: bytes) -> bool:
        """Whether these bytes are the block."""
        return crc32(data) == int(self._sums[number])

    def read(self, number: int) -> bytes:
        """Reads a block from file or store. Raises DataError: it is damaged, or cannot be used."""
        start = number * BLOCK
        data = self._file.read(start, min(start + BLOCK, self.bytes_of(0, self._tokens)[1]))
        where = f"{self._file.name} at byte {start:,}"
        if not self.is_whole(number, data):
            fix = "write the shards again by `raypp data tokenize`, or copy them again"
            raise DataError(Problem(self._file.place, f"{where} is damaged (its CRC-32 differs)", fix))
        self.check(data, where)
        return data

    def check(self, data: bytes, where: str) -> None:
        """Raises DataError if a block that is whole cannot be used."""

    def _numbers(self, begin: int, end: int) -> range:
        first, last = self.bytes_of(begin, end)
        return range(first // BLOCK, -(-last // BLOCK))


class Shard(Blocks):
    """A shard's ids. `number`: in its folder. `below`: bound of the ids. Others: see `Blocks`."""

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
        super().__init__(str(number), file, tokens, sums, cache)
        self._dtype, self._below = dtype, below

    def bytes_of(self, begin: int, end: int) -> tuple[int, int]:
        return begin * self._dtype.itemsize, end * self._dtype.itemsize

    def __getitem__(self, span: slice) -> IdArray:
        begin, end, _ = span.indices(self._tokens)
        data, start = self.between(begin, end)
        return np.frombuffer(data, self._dtype, max(0, end - begin), start)

    def check(self, data: bytes, where: str) -> None:
        highest = int(np.frombuffer(data, self._dtype).max())
        if highest >= self._below:
            fault = f"{where} has the id {highest}, but model.vocab_size is {self._below}"
            raise DataError(Problem(self._file.place, fault, "set model.vocab_size to more than the highest id"))


class ShardMask(Blocks):
    """Which ids of one shard carry loss, a bit each; see `Blocks`."""

    def bytes_of(self, begin: int, end: int) -> tuple[int, int]:
        return begin // 8, mask_bytes(end)

    def __getitem__(self, span: slice) -> Mask:
        begin, end, _ = span.indices(self._tokens)
        count = max(0, end - begin)
        data, start = self.between(begin, end)
        packed = np.frombuffer(data, np.uint8, mask_bytes(begin % 8 + count), start)
        return np.unpackbits(packed, bitorder="little")[begin % 8 : begin % 8 + count].view(np.bool_)
