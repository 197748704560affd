"""Tokenises text into a corpus: small data in memory, large data in the node's cache."""

from __future__ import annotations

import hashlib
import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus, small_dtype
from raypp.data.node_cache import cache_directory, made_once
from raypp.data.source_files import SourceFile
from raypp.data.stored_arrays import read_meta, read_offsets
from raypp.data.tokenizer import NotEncodable, Tokenizer
from raypp.errors import DataError, Problem
from raypp.spec.job import DataSection
from raypp.untrusted.files import open_file

FORMAT = 1
"""Version of the cache's entries; part of their name."""
IN_MEMORY_BYTES = 32 << 20
"""Every rank tokenises up to this much text itself; more goes through the cache."""
_BATCH, _BATCH_CHARACTERS = 512, 4 << 20


@dataclass(frozen=True)
class Request:
    """A request to a source.

    Attributes:
        data: The job's `data:` section.
        path: The path of the data (training or held-out).
        place: The key of the job file that sets the path.
        tokenizer: The job's tokenizer.
        vocab_size: The model's vocabulary; all ids are below it.
        seed: The job's seed.
        instead: Called by `tokenise` with its arguments, if something else shall become of the
            documents than a corpus in memory or in the cache.
    """

    data: DataSection
    path: str
    place: str
    tokenizer: Tokenizer
    vocab_size: int
    seed: int
    instead: Callable[[Request, Sequence[SourceFile], Callable[[], Iterable[Text]]], Corpus] | None = None


@dataclass(frozen=True)
class Text:
    """A document before tokenising, and its place (`file:line`)."""

    place: str
    text: str


def tokenise(request: Request, files: Sequence[SourceFile], documents: Callable[[], Iterable[Text]]) -> Corpus:
    """Tokenises documents into a corpus.

    Args:
        request: The request to the source.
        files: The files of the documents; they determine the cache entry's name.
        documents: Yields all documents in order; called only if they must be read.

    Raises:
        DataError: There is no document, one has no token, or the cache cannot be written.
    """
    if request.instead is not None:
        return request.instead(request, files, documents)
    if sum(file.size for file in files) <= IN_MEMORY_BYTES:
        sink = io.BytesIO()
        offsets, digest = _write(sink, request, documents())
        dtype = small_dtype(request.tokenizer.vocab_size)
        return Corpus((np.frombuffer(sink.getbuffer(), dtype=dtype),), offsets, digest)

    def make(room: Path) -> None:
        with (room / "tokens").open("wb") as sink:
            offsets, digest = _write(sink, request, documents())
        np.save(room / "offsets.npy", offsets)
        meta = {"digest": digest, "tokens": int(offsets[-1]), "dtype": small_dtype(request.tokenizer.vocab_size).name}
        (room / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    return _open(made_once(cache_directory() / "tokens" / entry_name(request, files), make), request)


def entry_name(request: Request, files: Sequence[SourceFile]) -> str:
    """Returns the entry's name: a digest of files (name, size, time), tokenizer and settings."""
    parts: list[Any] = [FORMAT, request.data.kind, request.data.text_key, request.tokenizer.identity]
    parts += [[file.name, file.size, file.modified] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(entry: Path, request: Request) -> Corpus:
    meta, path = read_meta(entry, request.place), entry / "tokens"
    dtype = np.dtype(meta.get("dtype", "uint8"))
    count = meta.get("tokens", 0)
    with open_file(path, place=request.place, fix=f"delete {entry}") as file:
        size = path.stat().st_size
        if not count or size != count * dtype.itemsize:
            what = f"{path} has {size} bytes, not {count} tokens of {dtype}"
            raise DataError(Problem(request.place, what, f"delete {entry}"))
        tokens = np.memmap(file, dtype=dtype, mode="r", shape=(count,))
    return Corpus((tokens,), read_offsets(entry, count, request.place), meta["digest"])


def _write(sink: BinaryIO, request: Request, documents: Iterable[Text]) -> tuple[np.ndarray[Any, Any], str]:
    """Writes the ids of all documents, each with its end id; returns the offsets and the digest."""
    digest, ends = hashlib.sha256(), array("q", [0])
    for batch in batches(documents):
        for content, count in encoded(request, batch):
            sink.write(content)
            digest.update(content)
            ends.append(ends[-1] + count)
    if len(ends) == 1:
        what = f"{request.path} contains no documents"
        raise DataError(Problem(request.place, what, "use files that contain text"))
    offsets = np.frombuffer(ends, dtype=np.int64)
    digest.update(offsets.data)
    return offsets, digest.hexdigest()[:16]


def encoded(request: Request, batch: Sequence[Text]) -> Iterator[tuple[bytes, int]]:
    """Yields the ids of each document with its end id, in the dtype of files, and their number.

    Raises:
        DataError: A document has no token, or the tokenizer cannot encode it; names its place.
    """
    dtype = small_dtype(request.tokenizer.vocab_size)
    for document, ids in zip(batch, _encoded(request, batch), strict=True):
        if not len(ids):
            what = f"{document.place} is a document without a token"
            raise DataError(Problem(request.place, what, "remove it"))
        yield np.append(ids, request.tokenizer.eos_id).astype(dtype).tobytes(), len(ids) + 1


def _encoded(request: Request, batch: Sequence[Text]) -> list[NDArray[np.int64]]:
    try:
        return request.tokenizer.encode_batch([document.text for document in batch])
    except NotEncodable as error:
        if len(batch) > 1:  # finds the document that fails
            return [ids for document in batch for ids in _encoded(request, [document])]
        what = f"the tokenizer cannot encode {batch[0].place}: {error}"
        raise DataError(Problem(request.place, what, "remove it, or use a tokenizer that can encode it")) from error


def batches(documents: Iterable[Text]) -> Iterator[list[Text]]:
    """Yields lists of documents, neither of many nor of much text."""
    batch: list[Text] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == _BATCH or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
