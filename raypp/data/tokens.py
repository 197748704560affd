"""Token ids: shards of `raypp data tokenize`, or one-dimensional `.npy` files made elsewhere.

In the latter, the end id separates documents. The arrays are memory-mapped and never loaded whole.
One pass finds the start of each document; for large files the node's cache keeps the result.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raypp.data.corpus import Corpus, IdArray
from raypp.data.node_cache import cache_directory, made_once
from raypp.data.source_files import SourceFile, find_files
from raypp.data.stored_arrays import map_array, read_meta, read_offsets
from raypp.data.token_shards import ENDING, manifest_of, open_shards
from raypp.data.tokenised import IN_MEMORY_BYTES, Request, entry_name
from raypp.errors import DataError, Problem
from raypp.kinds import SourceKind

KIND = SourceKind("tokens", "token ids, already encoded", position=3, endings=(".npy", ".ids"), ids="tokenizer")

_CHUNK = 4 << 20  # ids


def read(request: Request) -> Corpus:
    """Reads all documents of all files, in order of file name; the end of a file ends a document.

    Raises:
        DataError: No file, not such an array, an id beyond the model's, a document without a token,
            or shards that are unfinished or damaged.
    """
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
        what = f"{file.name} holds {ids.dtype} of shape {list(ids.shape)}"
        raise DataError(Problem(request.place, what, "use a one-dimensional, non-empty array of integers"))
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
        what = f"{file.name}: document {int(lone[0])} (at [{int(borders[lone[0]])}]) is a document without a token"
        raise DataError(Problem(request.place, what, "remove the repeated end id"))


def _check_ids(chunk: IdArray, start: int, file: SourceFile, request: Request) -> None:
    wrong = np.flatnonzero((chunk < 0) | (chunk >= request.vocab_size))
    if len(wrong):
        place = int(wrong[0])
        what = f"{file.name}[{start + place}] is {int(chunk[place])}, but model.vocab_size is {request.vocab_size}"
        fix = "set model.vocab_size to more than the highest id" if chunk[place] >= 0 else "ids start at 0"
        raise DataError(Problem(request.place, what, fix))
