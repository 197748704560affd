"""Reads byte ranges of objects of a checkpoint in whole blocks, each checked; verifies all."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from raypp.errors import CheckpointError, Problem
from raypp.records import Progress, no_progress
from raypp.state.checkpoint.commit import Commit, ObjectRecord, read_commit
from raypp.state.checkpoint.layout import ADVICE
from raypp.state.checkpoint.tensor_file import BOUNDS, Box, FileHeader, TensorEntry, decode_header
from raypp.storage import NotFound, ObjectStore

_READERS = 8
_READ_BYTES = 16 << 20
"""Largest size of one request."""
_READS = 3
"""Number of times a range is read before it is reported as damaged."""
_ADVICE = f"{ADVICE}; `raypp checkpoints list` shows them"
T = TypeVar("T")

log = logging.getLogger(__name__)


class ObjectInMemory:
    """An object of which some ranges of the data section are in host memory. `pieces`: first byte
    in the data section, and the bytes from there on."""

    def __init__(self, pieces: Sequence[tuple[int, memoryview]] = ()) -> None:
        self.pieces = list(pieces)

    def view(self, begin: int, end: int) -> memoryview:
        """Returns bytes `[begin, end)` of the data section, which one piece must contain."""
        for first, data in self.pieces:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        raise KeyError(f"bytes {begin} to {end} are not in memory")

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(len(data) for _, data in self.pieces)


@dataclass(frozen=True)
class CheckpointFile:
    """An object, its header, which has been checked, and where its bytes are."""

    record: ObjectRecord
    header: FileHeader
    source: ObjectStore | ObjectInMemory

    def blocks(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the ranges of the data section that whole blocks take to cover these ranges."""
        size, end = self.header.block_bytes, self.record.size - self.header.size
        return [(first * size, min(last * size, end)) for first, last in _block_runs(ranges, size)]

    def checked(self, begin: int, raw: bytes | memoryview) -> memoryview:
        """Returns whole blocks from byte `begin` on. Raises CheckpointError: one is corrupt."""
        data, size = memoryview(raw), self.header.block_bytes
        for at in range(0, len(data), size):
            self.header.check_block((begin + at) // size, data[at : at + size], self.record.key)
        return data


@dataclass(frozen=True)
class Piece:
    """The overlap of a wanted box with a saved slice of the same tensor."""

    file: CheckpointFile
    entry: TensorEntry
    box: Box

    @property
    def bytes(self) -> tuple[int, int]:
        """The range in the file's data section of the rows (dim 0) that overlap."""
        entry = self.entry
        if not self.box:
            return entry.begin, entry.end
        row = (entry.end - entry.begin) // entry.shape[0]
        first, last = (row * (index - entry.offset[0]) for index in self.box[0])
        return entry.begin + first, entry.begin + last

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what lies in that range."""
        return (self.box[0][1] - self.box[0][0], *self.entry.shape[1:]) if self.box else ()


def overlaps(box: Box, parts: Iterable[tuple[CheckpointFile, TensorEntry]]) -> list[Piece]:
    """Returns the pieces of saved slices in a box; of equal ones (a tied weight) the first."""
    pieces: dict[Box, Piece] = {}
    for file, entry in parts:
        common = tuple(
            (max(begin, first), min(end, first + size))
            for (begin, end), first, size in zip(box, entry.offset, entry.shape, strict=True)
        )
        if all(begin < end for begin, end in common):
            pieces.setdefault(common, Piece(file, entry, common))
    return list(pieces.values())


def by_name(files: Iterable[CheckpointFile]) -> dict[str, list[tuple[CheckpointFile, TensorEntry]]]:
    slices: dict[str, list[tuple[CheckpointFile, TensorEntry]]] = {}
    for file in files:
        for entry in file.header.entries:
            slices.setdefault(entry.name, []).append((file, entry))
    return slices


def ranges_of(pieces: Iterable[Piece]) -> dict[str, list[tuple[int, int]]]:
    """Returns what to read for pieces, as `fetch_ranges` takes it."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        ranges.setdefault(piece.file.record.key, []).append(piece.bytes)
    return ranges


def open_files(store: ObjectStore, commit: Commit) -> list[CheckpointFile]:
    """Reads and checks every object's header. Raises CheckpointError: one is missing or corrupt."""

    def read(record: ObjectRecord) -> CheckpointFile:
        def check(raw: bytes | memoryview) -> bytes:
            header = bytes(raw)
            if hashlib.sha256(header).hexdigest() != record.header_sha256:
                fault = "is torn or corrupt: its header is not the one committed"
                raise CheckpointError(Problem(record.key, fault, _ADVICE))
            return header

        if record.header_size > BOUNDS.size:
            fault = f"has a header of {record.header_size:,} bytes; at most {BOUNDS.size:,} are read"
            raise CheckpointError(Problem(record.key, fault, _ADVICE))
        header = _get_checked(store, record.key, 0, record.header_size, check)
        return CheckpointFile(record, decode_header(header, record.key, record.size), store)

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, commit.objects))


def fetch_ranges(
    files: Sequence[CheckpointFile], ranges: Mapping[str, Iterable[tuple[int, int]]], progress: Progress = no_progress
) -> dict[str, ObjectInMemory]:
    """Reads ranges of the data sections concurrently, and checks every block they touch. What is in
    memory is checked there and not copied. Returns the objects by their keys. `ranges`: for each
    object key, ranges `[begin, end)` of its data section, none empty. Raises CheckpointError: an
    object, which the message names, is missing, torn or corrupt."""
    by_key = {file.record.key: file for file in files}
    objects = {key: ObjectInMemory() for key in ranges}
    reads: list[tuple[ObjectStore, CheckpointFile, int, memoryview]] = []
    for key, wanted in ranges.items():
        file, source = by_key[key], by_key[key].source
        at_once = max(1, _READ_BYTES // file.header.block_bytes) * file.header.block_bytes
        for begin, end in file.blocks(wanted):
            if isinstance(source, ObjectInMemory):
                data = source.view(begin, end)
                file.checked(begin, data)  # here: it takes less time than threads take to change places
            else:
                data = memoryview(bytearray(end - begin))
                reads += [(source, file, at, data[at - begin :][:at_once]) for at in range(begin, end, at_once)]
            objects[key].pieces.append((begin, data))

    def read(store: ObjectStore, file: CheckpointFile, begin: int, into: memoryview) -> None:
        start = file.header.size + begin
        into[:] = _get_checked(store, file.record.key, start, start + len(into), partial(file.checked, begin))

    with ThreadPoolExecutor(_READERS) as pool:
        for done, _ in enumerate(pool.map(read, *zip(*reads, strict=True)), 1):
            progress(done, len(reads))
    return objects


def _block_runs(ranges: Iterable[tuple[int, int]], block_bytes: int) -> list[tuple[int, int]]:
    """Returns the blocks that the ranges touch, as runs `[first, last)` of consecutive blocks."""
    touched = sorted({(begin // block_bytes, -(-end // block_bytes)) for begin, end in ranges})
    runs: list[tuple[int, int]] = []
    for first, last in touched:
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs


def _get_checked(source: ObjectStore, key: str, begin: int, end: int, check: Callable[[bytes | memoryview], T]) -> T:
    """Reads and checks a range; reads it again before it reports a damage. The bytes may have been
    damaged in transit, and every rejected checkpoint costs steps."""
    for left in reversed(range(_READS)):
        try:
            return check(_get(source, key, begin, end))
        except CheckpointError as error:
            if not left:
                raise
            log.warning("%s; reading bytes %d to %d again", error.problems[0].fault, begin, end)
    raise AssertionError("unreachable")


def _get(source: ObjectStore, key: str, begin: int, end: int) -> bytes | memoryview:
    try:
        data = source.get(key, begin, end)
    except NotFound:
        raise CheckpointError(Problem(key, "is missing", _ADVICE)) from None
    if len(data) != end - begin:
        raise CheckpointError(Problem(key, f"is torn: it ends before byte {end}", _ADVICE))
    return data


def verify_checkpoint(
    store: ObjectStore,
    run: str,
    step: int,
    *,
    every_byte: bool = True,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> list[Problem]:
    """Checks one checkpoint. `every_byte`: compares the SHA-256 of all objects; else their sizes.
    Returns one problem per object that is missing, torn or corrupt, in rank order."""
    try:
        commit = read_commit(store, run, step)
    except CheckpointError as error:
        return list(error.problems)

    def check(record: ObjectRecord) -> Problem | None:
        return verify_object(store, record, every_byte, progress)

    with ThreadPoolExecutor(_READERS) as pool:
        return [problem for problem in pool.map(check, commit.objects) if problem is not None]


def verify_object(
    store: ObjectStore, record: ObjectRecord, every_byte: bool, progress: Callable[[int], None]
) -> Problem | None:
    """Returns the problem of one object, or None. Reads it in pieces of 16 MiB."""
    info = store.head(record.key)
    if info is None:
        return Problem(record.key, "is missing", _ADVICE)
    if info.size != record.size:
        return Problem(record.key, f"has {info.size} bytes, but {record.size} were written", _ADVICE)
    if not every_byte:
        return None
    try:
        # A mismatch is read once more: the bytes may have been damaged in transit.
        if _sha256(store, record, progress) == record.sha256 or _sha256(store, record) == record.sha256:
            return None
    except NotFound:
        return Problem(record.key, "disappeared while it was read", _ADVICE)
    return Problem(record.key, "is corrupt: its SHA-256 is not the one that was committed", _ADVICE)


def _sha256(store: ObjectStore, record: ObjectRecord, progress: Callable[[int], None] = lambda _bytes: None) -> str:
    digest = hashlib.sha256()
    for start in range(0, record.size, _READ_BYTES):
        piece = store.get(record.key, start, min(start + _READ_BYTES, record.size))
        digest.update(piece)
        progress(len(piece))
    return digest.hexdigest()
