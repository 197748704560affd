"""Writes token shards: tokenises a source once, in several processes, and goes on after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from raypp.data.corpus import Corpus, small_dtype
from raypp.data.rows import RowEncoder
from raypp.data.shard_format import (
    BLOCK,
    MANIFEST,
    MANIFEST_BOUNDS,
    PLAN,
    RECORD_BOUNDS,
    Manifest,
    ShardPlan,
    ShardRecord,
    shard_name,
)
from raypp.data.source_files import SourceFile, watching
from raypp.data.tokenised import Request, Text, batches, encoded, entry_name
from raypp.errors import DataError, Problem, RayppError
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import parse_as

SHARD_BYTES = 32 << 20
_AHEAD = 2  # batches in work per process
_READ = 16 << 20


@dataclass(frozen=True)
class Options:
    """How shards are written.

    Attributes:
        processes: Processes that tokenise.
        shard_bytes: A shard ends with the document that reaches this size.
        total: Called once with the bytes of the source.
        progress: Called with bytes of the source that were read since the last call.
        found: Called with the number of shards that were there already.
    """

    processes: int
    shard_bytes: int = SHARD_BYTES
    total: Callable[[int], None] = lambda count: None
    progress: Callable[[int], None] = lambda count: None
    found: Callable[[int], None] = lambda count: None


def write_shards(read: Callable[[Request], Corpus], request: Request, store: ObjectStore, options: Options) -> Manifest:
    """Tokenises a source into shards in a store, and commits them by their manifest.

    Shards that are there already, from a call that was killed, are checked and kept.

    Args:
        read: The function of the source's kind.
        request: What to read.
        store: Opened at the folder of the shards.
        options: How.

    Raises:
        DataError: The source cannot be read, or the folder holds shards of something else.
        StoreError: The store failed.
    """
    made: list[Manifest] = []

    def instead(
        request: Request,
        files: Sequence[SourceFile],
        documents: Callable[[], Iterable[Any]],
        encoder: RowEncoder | None,
    ) -> Corpus:
        if encoder is not None:
            what = "token shards hold no loss masks, which conversations have"
            raise DataError(Problem("data.kind", what, "train on them as they are"))
        options.total(sum(file.size for file in files))
        with watching(options.progress):
            made.append(_write(replace(request, instead=None), files, documents, store, options))
        return Corpus((), np.zeros(1, dtype=np.int64), made[0].digest)

    read(replace(request, instead=instead))
    if not made:
        what = f"kind {request.data.kind} has no text to tokenise"
        raise DataError(Problem("data.kind", what, "train on it as it is"))
    return made[0]


def _write(
    request: Request,
    files: Sequence[SourceFile],
    documents: Callable[[], Iterable[Text]],
    store: ObjectStore,
    options: Options,
) -> Manifest:
    tokenizer = request.tokenizer
    plan = ShardPlan(
        1, entry_name(request, files), request.path, tokenizer.identity, tokenizer.vocab_size, tokenizer.eos_id,
        small_dtype(tokenizer.vocab_size).name, BLOCK, options.shard_bytes,  # type: ignore[arg-type]
    )  # fmt: skip
    _begin(plan, store)
    if (finished := _stored(store, MANIFEST)) is not None:
        manifest = parse_as(Manifest, finished, f"{store.url}/{MANIFEST}", MANIFEST_BOUNDS, DataError)
        options.found(len(manifest.shards))
        return manifest
    digest = hashlib.sha256()
    records = list(_verified(store, plan, digest.update))
    options.found(len(records))
    done = sum(record.documents for record in records)
    shard = _Shard(store, plan, len(records))
    for contents in _tokenised(request, islice(documents(), done, None), options.processes):
        for content, count in contents:
            digest.update(content)
            shard.add(content, count)
            if shard.size >= plan.shard_bytes:
                records.append(shard.finish())
                shard = _Shard(store, plan, len(records))
    if shard.size:
        records.append(shard.finish())
    if not records:
        raise DataError(Problem(request.place, f"{request.path} contains no documents", "use files that contain text"))
    tokens = 0
    digest.update(np.zeros(1, dtype=np.int64).data)
    for number, record in enumerate(records):  # read again rather than kept: 8 bytes per document
        index = store.get(f"{shard_name(number)}.index", 0, 8 * record.documents)
        digest.update((np.frombuffer(index, dtype="<i8").astype(np.int64) + tokens).data)
        tokens += record.tokens
    manifest = Manifest(plan, digest.hexdigest()[:16], tokens, sum(one.documents for one in records), records)
    with contextlib.suppress(AlreadyExists):  # of another process, which wrote the same
        store.put(MANIFEST, json.dumps(asdict(manifest)).encode(), if_absent=True)
    return manifest


class _Shard:
    """The shard that is being filled."""

    def __init__(self, store: ObjectStore, plan: ShardPlan, number: int) -> None:
        self._store, self._name, self._width = store, shard_name(number), np.dtype(plan.dtype).itemsize
        self._ids, self._ends = bytearray(), array("q")

    @property
    def size(self) -> int:
        return len(self._ids)

    def add(self, content: bytes, tokens: int) -> None:
        self._ids += content
        self._ends.append((self._ends[-1] if self._ends else 0) + tokens)

    def finish(self) -> ShardRecord:
        """Stores the shard, its record last."""
        view = memoryview(self._ids)
        sums = np.array([zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)], dtype="<u4")
        index = np.frombuffer(self._ends, dtype=np.int64).astype("<i8").tobytes() + sums.tobytes()
        record = ShardRecord(
            len(view) // self._width,
            len(self._ends),
            hashlib.sha256(view).hexdigest(),
            hashlib.sha256(index).hexdigest(),
        )
        self._store.put(f"{self._name}.ids", view)
        self._store.put(f"{self._name}.index", index)
        self._store.put(f"{self._name}.json", json.dumps(asdict(record)).encode())
        return record


def _begin(plan: ShardPlan, store: ObjectStore) -> None:
    """Claims the folder for a plan, or finds that it is of the same plan."""
    try:
        store.put(PLAN, json.dumps(asdict(plan)).encode(), if_absent=True)
    except AlreadyExists:
        there = parse_as(ShardPlan, store.get(PLAN), f"{store.url}/{PLAN}", RECORD_BOUNDS, DataError)
        if there != plan:
            changed = [name for name, value in asdict(plan).items() if asdict(there)[name] != value]
            what = f"{store.url} holds shards of other data (another {', '.join(changed)})"
            raise DataError(Problem("--out", what, "use an empty place, or remove what is there")) from None


def _verified(store: ObjectStore, plan: ShardPlan, update: Callable[[bytes], None]) -> Iterator[ShardRecord]:
    """Yields the shards that are finished, in order, up to the first that is missing or damaged."""
    number = 0
    while (document := _stored(store, f"{shard_name(number)}.json")) is not None:
        place = f"{store.url}/{shard_name(number)}.json"
        record = parse_as(ShardRecord, document, place, RECORD_BOUNDS, DataError, "remove this object, and go on")
        size, found = record.tokens * np.dtype(plan.dtype).itemsize, hashlib.sha256()
        for start in range(0, size, _READ):
            chunk = store.get(f"{shard_name(number)}.ids", start, min(size, start + _READ))
            found.update(chunk)
            update(chunk)
        if found.hexdigest() != record.ids_sha256:
            what = f"{store.url}/{shard_name(number)}.ids is damaged"
            raise DataError(Problem("--out", what, f"remove {shard_name(number)}.json, and go on"))
        yield record
        number += 1


def _stored(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


_Contents = list[tuple[bytes, int]]


def _tokenised(request: Request, documents: Iterable[Text], processes: int) -> Iterator[_Contents]:
    """Yields the ids of all documents in order, a batch at a time."""
    if processes <= 1:
        for batch in batches(documents):
            yield list(encoded(request, batch))
        return
    waiting: deque[Future[_Contents | tuple[Problem, ...]]] = deque()
    remaining = batches(documents)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_process, (request,)) as pool:
        try:
            while True:
                for batch in islice(remaining, _AHEAD * processes - len(waiting)):
                    waiting.append(pool.submit(_encode, batch))
                if not waiting:
                    return
                found = waiting.popleft().result()
                if isinstance(found, tuple):
                    raise DataError(list(found))
                yield found
        except BrokenProcessPool as error:
            what = "a process that tokenised has ended, perhaps for lack of memory"
            raise DataError(Problem("--processes", what, "run the command again: it goes on; or use fewer")) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_request: Request | None = None


def _start_process(request: Request) -> None:
    global _request
    _request = request
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode(batch: list[Text]) -> _Contents | tuple[Problem, ...]:
    assert _request is not None
    try:
        return list(encoded(_request, batch))
    except RayppError as error:
        return tuple(error.problems)
