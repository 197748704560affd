"""Writes token shards: tokenises the sources of a job once, in processes; resumes after a kill."""

import contextlib
import hashlib
import multiprocessing
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from raypp.crc32 import crc32
from raypp.errors import DataError, Problem, RayppError
from raypp.job.job import Job, SourceOptions
from raypp.kinds import SOURCES
from raypp.rank.data.corpus import Corpus, small_dtype
from raypp.rank.data.faults import Faults
from raypp.rank.data.mixture import part_names
from raypp.rank.data.rows import RowEncoder
from raypp.rank.data.shard_format import (
    BLOCK,
    MANIFEST,
    MANIFEST_BOUNDS,
    PLAN,
    RECORD_BOUNDS,
    Manifest,
    ShardPlan,
    ShardRecord,
    around_of,
    as_json,
    shard_name,
)
from raypp.rank.data.source_files import SourceFile, watching
from raypp.rank.data.sources import source_request
from raypp.rank.data.tokenised import Record, Request, Text, batches, encoded, entry_name
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import parse_as

SHARD_BYTES = 32 << 20
_Documents = Callable[[], Iterable[Text | Record]]


@dataclass(frozen=True)
class Options:
    """How shards are written. `total`: called once with the bytes of the source. `progress`: called
    with bytes of it read since the last call. `stored`: called with the number of shards there
    already. `remarked`: called with each remark on the data, such as what of them is not used."""

    processes: int
    shard_bytes: int = SHARD_BYTES
    total: Callable[[int], None] = lambda count: None
    progress: Callable[[int], None] = lambda count: None
    stored: Callable[[int], None] = lambda count: None
    remarked: Callable[[str], None] = lambda remark: None


def write_shards(read: Callable[[Request], Corpus], request: Request, store: ObjectStore, options: Options) -> Manifest:
    """Tokenises a source into shards in a store, and commits them by their manifest. Shards of a
    call that was killed are checked and kept. Raises DataError: the source cannot be read, or the
    folder holds shards of something else; StoreError: the store failed."""
    made: list[Manifest] = []

    def written(
        request: Request, files: Sequence[SourceFile], documents: _Documents, encoder: RowEncoder | None
    ) -> Corpus:
        options.total(sum(file.size for file in files))
        with watching(options.progress):
            made.append(_write(replace(request, consumer=None), files, documents, encoder, store, options))
        return Corpus((), np.zeros(1, dtype=np.int64), made[0].digest)

    read(replace(request, consumer=written))
    if not made:
        fault = f"kind {request.data.kind} has no text to tokenise"
        raise DataError(Problem("data.kind", fault, "train on it as it is"))
    return made[0]


def _write(
    request: Request,
    files: Sequence[SourceFile],
    documents: _Documents,
    encoder: RowEncoder | None,
    store: ObjectStore,
    options: Options,
) -> Manifest:
    plan = _plan(request, files, encoder, options)
    _begin(plan, store)
    if (finished := _stored(store, MANIFEST)) is not None:
        manifest = parse_as(Manifest, finished, f"{store.url}/{MANIFEST}", MANIFEST_BOUNDS, DataError)
        options.stored(len(manifest.shards))
        return manifest
    digest = hashlib.sha256()
    records = list(_verified(store, plan, digest.update))
    options.stored(len(records))
    done = sum(record.documents for record in records)
    shard, faults = _Shard(store, plan, len(records)), Faults(request.place)
    left = islice(documents(), done, None)
    for contents, unusable in contents_of(request, encoder, left, options.processes):
        faults.take(unusable)
        for content, loss in () if faults else contents:
            digest.update(content)
            digest.update(loss)
            shard.add(content, loss)
            if shard.size >= plan.shard_bytes:
                records.append(shard.finish())
                shard = _Shard(store, plan, len(records))
        faults.end_in_time()
    faults.end()
    for remark in faults.remarked():
        options.remarked(remark)
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
        store.put(MANIFEST, as_json(manifest), if_absent=True)
    return manifest


def _plan(request: Request, files: Sequence[SourceFile], encoder: RowEncoder | None, options: Options) -> ShardPlan:
    tokenizer, more = request.tokenizer, [] if encoder is None else [encoder.identity]
    return ShardPlan(
        1 if encoder is None else 2,
        entry_name(request, files, *more),
        request.path,
        tokenizer.identity,
        tokenizer.vocab_size,
        tokenizer.eos_id,
        small_dtype(tokenizer.vocab_size).name,  # type: ignore[arg-type]
        BLOCK,  # type: ignore[arg-type]
        options.shard_bytes,
        "" if encoder is None else encoder.template,
        around_of(tokenizer),
    )


class _Shard:
    """The shard that is being filled."""

    def __init__(self, store: ObjectStore, plan: ShardPlan, number: int) -> None:
        self._store, self._name, self._width = store, shard_name(number), np.dtype(plan.dtype).itemsize
        self._ids, self._loss, self._ends = bytearray(), bytearray(), array("q")
        self._masks = plan.masks

    @property
    def size(self) -> int:
        return len(self._ids)

    def add(self, content: bytes, loss: bytes) -> None:
        """Adds a document: its ids, and if the shards have masks a bool per id."""
        self._ids += content
        self._loss += loss
        self._ends.append(len(self._ids) // self._width)

    def finish(self) -> ShardRecord:
        """Stores the shard, its record last."""
        ids = memoryview(self._ids)
        loss = np.packbits(np.frombuffer(self._loss, dtype=np.bool_), bitorder="little").data
        index = np.frombuffer(self._ends, dtype=np.int64).astype("<i8").tobytes() + _sums(ids) + _sums(loss)
        record = ShardRecord(
            len(ids) // self._width,
            len(self._ends),
            hashlib.sha256(ids).hexdigest(),
            hashlib.sha256(index).hexdigest(),
            hashlib.sha256(loss).hexdigest() if self._masks else "",
        )
        self._store.put(f"{self._name}.ids", ids)
        if self._masks:
            self._store.put(f"{self._name}.loss", loss)
        self._store.put(f"{self._name}.index", index)
        self._store.put(f"{self._name}.json", as_json(record))
        return record


def _sums(data: memoryview) -> bytes:
    sums = [crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return np.array(sums, dtype="<u4").tobytes()


def _begin(plan: ShardPlan, store: ObjectStore) -> None:
    """Claims the folder for a plan, or checks that it has the same plan."""
    try:
        store.put(PLAN, as_json(plan), if_absent=True)
    except AlreadyExists:
        there = parse_as(ShardPlan, store.get(PLAN), f"{store.url}/{PLAN}", RECORD_BOUNDS, DataError)
        if there != plan:
            changed = [name for name, value in asdict(plan).items() if asdict(there)[name] != value]
            fault = f"{store.url} holds shards of other data (another {', '.join(changed)})"
            raise DataError(Problem("--out", fault, "use an empty place, or remove what is there")) from None


def _verified(store: ObjectStore, plan: ShardPlan, update: Callable[[Any], None]) -> Iterator[ShardRecord]:
    """Checks the finished shards, and adds them to the digest of all documents. Yields the records
    of the finished shards, in order, up to the first without a record."""
    number = 0
    while (document := _stored(store, f"{shard_name(number)}.json")) is not None:
        url = f"{store.url}/{shard_name(number)}.json"
        fix = "remove this object, and run the command again"
        record = parse_as(ShardRecord, document, url, RECORD_BOUNDS, DataError, fix)
        ids = memoryview(_whole(store, number, "ids", record.ids_sha256))
        if plan.masks:
            packed = np.frombuffer(_whole(store, number, "loss", record.loss_sha256), dtype=np.uint8)
            loss = np.unpackbits(packed, count=record.tokens, bitorder="little")
            index = _whole(store, number, "index", record.index_sha256)
            width = np.dtype(plan.dtype).itemsize
            for begin, end in pairwise([0, *np.frombuffer(index, "<i8", record.documents).tolist()]):
                update(ids[begin * width : end * width])
                update(loss[begin:end].data)
        else:
            update(ids)
        yield record
        number += 1


def _whole(store: ObjectStore, number: int, ending: str, sha256: str) -> bytes:
    """Returns an object of a finished shard; raises DataError if it is damaged."""
    name = shard_name(number)
    content = _stored(store, f"{name}.{ending}")
    if content is None or hashlib.sha256(content).hexdigest() != sha256:
        fault = f"{store.url}/{name}.{ending} is {'missing' if content is None else 'damaged'}"
        raise DataError(Problem("--out", fault, f"remove {name}.json, and run the command again"))
    return content


def _stored(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


_AHEAD = 2  # batches in work per process
Contents = tuple[list[tuple[bytes, bytes]], Faults]
"""Ids and loss of each document of a batch, as `encoded` has them, and its unusable records."""


def contents_of(
    request: Request, encoder: RowEncoder | None, documents: Iterable[Text | Record], processes: int
) -> Iterator[Contents]:
    """Yields all documents in order, in batches. Raises DataError: a text or a process fails."""
    if processes <= 1:
        for batch in batches(documents):
            yield _contents(request, encoder, batch)
        return
    waiting: deque[Future[Contents | list[Problem]]] = deque()
    remaining = batches(documents)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_process, (request, encoder)) as pool:
        try:
            while True:
                for batch in islice(remaining, _AHEAD * processes - len(waiting)):
                    waiting.append(pool.submit(_encode, batch))
                if not waiting:
                    return
                contents = waiting.popleft().result()
                if isinstance(contents, list):
                    raise DataError(contents)
                yield contents
        except BrokenProcessPool as error:
            fault = "a process that tokenised has ended, perhaps for lack of memory"
            fix = "run the command again: it continues; or use fewer"
            raise DataError(Problem("--processes", fault, fix)) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _contents(request: Request, encoder: RowEncoder | None, batch: list[Any]) -> Contents:
    faults = Faults(request.place)
    contents = [(ids.tobytes(), loss.tobytes()) for ids, loss in encoded(request, encoder, batch, faults)]
    return contents, faults


_given: tuple[Request, RowEncoder | None] | None = None


def _start_process(request: Request, encoder: RowEncoder | None) -> None:
    global _given
    _given = request, encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode(batch: list[Any]) -> Contents | list[Problem]:
    assert _given is not None
    try:
        return _contents(*_given, batch)
    except RayppError as error:
        return list(error.problems)


@dataclass(frozen=True)
class Output:
    """A folder of token shards. `key`: the section of the job file whose documents it holds:
    `data`, `data.eval` or `data.parts[2]`. `name`: of the folder below `--out`; empty: that folder
    itself. `read`: the function of the source's kind."""

    key: str
    name: str
    read: Callable[[Request], Corpus]
    request: Request


def outputs_of(job: Job) -> list[Output]:
    """Returns the folders of shards for a job's documents. A mixture has one for each part with
    text, named like the part; other parts stay as they are. A source with `data.eval.path` has
    `train` and `eval`. Raises DataError: there is no text, or the tokenizer cannot be used."""
    data = job.data
    if data.parts and SOURCES.get(data.kind).mixes:
        names = part_names(data.parts)
        texts = [index for index, part in enumerate(data.parts) if _has_text(part.kind)]
        if not texts:
            raise DataError(Problem("data.parts", "no part has text to tokenise", "train on the mixture as it is"))
        return [_output(job, f"data.parts[{index}]", names[index], data.part(index)) for index in texts]
    if data.eval is None or data.eval.path is None:
        return [_output(job, "data", "", data)]
    held_out = data.model_copy(update={"path": data.eval.path})
    return [_output(job, "data", "train", data), _output(job, "data.eval", "eval", held_out)]


def section_of_shards(job: Job, urls: Mapping[str, str]) -> dict[str, Any]:
    """Returns a `data:` section to train on shards, rows as the job's. `urls`: by `Output.key`."""
    section = _without_defaults(job.data, ["loss"])
    if "data" in urls:
        section = {"kind": "tokens", "path": urls["data"], **_without_source(section)}
    if "data.eval" in urls:
        section["eval"] = {"path": urls["data.eval"]}
    if job.data.parts and "data" not in urls:
        section["parts"] = []
        for index, (part, name) in enumerate(zip(job.data.parts, part_names(job.data.parts), strict=True)):
            given = {**_without_defaults(part), "name": name}
            if (url := urls.get(f"data.parts[{index}]")) is not None:
                given = {"kind": "tokens", "path": url, **_without_source(given)}
            section["parts"].append(given)
    return section


def _output(job: Job, key: str, name: str, data: Any) -> Output:
    return Output(key, name, *source_request(job.model_copy(update={"data": data}), key))


def _has_text(kind: str) -> bool:
    source = SOURCES.get(kind)
    return source.ids == "text" and not source.mixes


def _without_defaults(options: SourceOptions, but: Sequence[str] = ()) -> dict[str, Any]:
    return options.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(but))


def _without_source(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in SourceOptions.model_fields}
