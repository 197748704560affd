"""Tokenises text into a corpus: small data in memory, large data in the node's cache."""

from __future__ import annotations

import hashlib
import io
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raypp.errors import DataError, Problem
from raypp.job.job import DataSection
from raypp.rank.data.corpus import Corpus, Mask, small_dtype
from raypp.rank.data.faults import Faults, RowFault
from raypp.rank.data.source_files import SourceFile
from raypp.rank.data.tokenizer import NotEncodable, Tokenizer, TooSlow, document_of, lacking
from raypp.storage.node_cache import cache_directory, made_once, read_meta, read_offsets
from raypp.untrusted.files import open_file

if TYPE_CHECKING:  # needs jinja2
    from raypp.rank.data.rows import RowEncoder

FORMAT = 1
"""Version of the cache's entries; part of their name."""
IN_MEMORY_BYTES = 32 << 20
"""Every rank tokenises up to this much text itself; more goes through the cache."""
_BATCH, _BATCH_CHARACTERS = 512, 4 << 20


@dataclass(frozen=True)
class Request:
    """A request to a source. `path`: the path of the data (training or held-out). `place`: the key
    of the job file that sets the path. `vocab_size`: the model's vocabulary; all ids are below it.
    `consumer`: called by `tokenise` with its arguments, to make something else than a corpus."""

    data: DataSection
    path: str
    place: str
    tokenizer: Tokenizer
    vocab_size: int
    seed: int
    consumer: Callable[..., Corpus] | None = None


@dataclass(frozen=True)
class Text:
    """A document before tokenising, its place (`file:line`), and columns that are not used."""

    place: str
    text: str
    unused: Collection[str] = ()


@dataclass(frozen=True)
class Record:
    """A row of a data set before tokenising, or what is wrong with it. `place`: where it is,
    `file:line`. `unused`: columns that were not even read."""

    place: str
    row: Mapping[str, Any] | RowFault
    unused: frozenset[str] = frozenset()


def tokenise(
    request: Request,
    files: Sequence[SourceFile],
    documents: Callable[[], Iterable[Text | Record]],
    encoder: RowEncoder | None = None,
) -> Corpus:
    """Tokenises documents into a corpus. `files`: of the documents; they name the cache entry.
    `documents`: yields all in order; called only if they must be read. They are texts, or with an
    encoder records. Without one, records say what is wrong with a text. Raises DataError: there is
    none, one has no token, rows cannot be used, or the cache cannot be written."""
    if request.consumer is not None:
        return request.consumer(request, files, documents, encoder)
    dtype, template = small_dtype(request.tokenizer.vocab_size), encoder.template if encoder is not None else ""
    if sum(file.text_bytes for file in files) <= IN_MEMORY_BYTES:
        ids, loss = io.BytesIO(), io.BytesIO()
        offsets, digest, remarks = _write(ids, loss, request, documents(), encoder)
        tokens = np.frombuffer(ids.getbuffer(), dtype=dtype)
        carries = (np.frombuffer(loss.getbuffer(), dtype=np.bool_),) if encoder is not None else None
        return Corpus((tokens,), offsets, digest, loss=carries, template=template, remarks=remarks)

    def make(room: Path) -> None:
        with (room / "tokens").open("wb") as ids, (room / "loss").open("wb") as loss:
            offsets, digest, remarks = _write(ids, loss, request, documents(), encoder)
        np.save(room / "offsets.npy", offsets)
        meta: dict[str, Any] = {"digest": digest, "tokens": int(offsets[-1]), "dtype": dtype.name}
        meta["remarks"] = remarks
        if encoder is not None:
            meta["loss"] = True
        else:
            (room / "loss").unlink()
        (room / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    more = [encoder.identity] if encoder is not None else []
    name = entry_name(request, files, f"end {request.tokenizer.eos_id}", *more)
    return replace(_open(made_once(cache_directory() / "tokens" / name, make), request), template=template)


def entry_name(request: Request, files: Sequence[SourceFile], *more: str) -> str:
    """Returns the entry's name: a digest of files (name, size, time), tokenizer and settings."""
    tokenizer = request.tokenizer
    parts: list[Any] = [FORMAT, request.data.kind, request.data.text_key, tokenizer.identity, *more]
    if tokenizer.before or tokenizer.after:
        parts.append([tokenizer.before, tokenizer.after])
    if tokenizer.vocab_size > request.vocab_size:  # then the model decides what can be encoded
        parts.append(request.vocab_size)
    parts += [[file.name, file.size, file.modified] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(entry: Path, request: Request) -> Corpus:
    meta = read_meta(entry, request.place)
    count = meta.get("tokens", 0)
    tokens = _mapped(entry / "tokens", np.dtype(meta.get("dtype", "uint8")), count, request)
    loss = (_mapped(entry / "loss", np.dtype(np.bool_), count, request),) if meta.get("loss") else None
    remarks = tuple(meta.get("remarks", ()))
    return Corpus((tokens,), read_offsets(entry, count, request.place), meta["digest"], loss=loss, remarks=remarks)


def _mapped(path: Path, dtype: np.dtype[Any], count: int, request: Request) -> Any:
    fix = f"delete {path.parent}"
    with open_file(path, place=request.place, fix=fix) as file:
        size = path.stat().st_size
        if not count or size != count * dtype.itemsize:
            fault = f"{path} has {size} bytes, not {count} tokens of {dtype}"
            raise DataError(Problem(request.place, fault, fix))
        return np.memmap(file, dtype=dtype, mode="r", shape=(count,))


def _write(
    ids_sink: BinaryIO, loss_sink: BinaryIO, request: Request, documents: Iterable[Text | Record],
    encoder: RowEncoder | None,
) -> tuple[np.ndarray[Any, Any], str, tuple[str, ...]]:  # fmt: skip
    """Writes the ids of all documents, and with an encoder which of them carry loss. Returns the
    offsets of the documents, the digest, and the remarks."""
    digest, ends = hashlib.sha256(), array("q", [0])
    faults = Faults(request.place)
    for batch in batches(documents):
        for ids, loss in encoded(request, encoder, batch, faults):
            for part, sink in ((ids, ids_sink), (loss, loss_sink)):
                content = part.tobytes()
                sink.write(content)
                digest.update(content)
            ends.append(ends[-1] + len(ids))
        faults.end_in_time()
    faults.end()
    if len(ends) == 1:
        fault = f"{request.path} contains no documents"
        raise DataError(Problem(request.place, fault, "use files that contain text"))
    offsets = np.frombuffer(ends, dtype=np.int64)
    digest.update(offsets.data)
    return offsets, digest.hexdigest()[:16], faults.remarked()


_Found = tuple[NDArray[Any], Mask]
_NO_LOSS = np.zeros(0, dtype=np.bool_)


def encoded(
    request: Request, encoder: RowEncoder | None, batch: Sequence[Text | Record], faults: Faults
) -> Iterator[_Found]:
    """Yields the ids of each document with what ends it, and which of them carry loss. `encoder`:
    encodes records; None: the batch has texts. `faults`: gets the records that cannot be used.
    The ids are `[n]` in the dtype of files; their loss, bool `[n]` of a record, `[0]` of a text.
    Raises DataError: a text has no token, or the tokenizer cannot encode it; names its place."""
    dtype = small_dtype(request.tokenizer.vocab_size)
    if encoder is None:
        for one in batch:
            if isinstance(one, Record) and isinstance(one.row, RowFault):
                faults.add(one.place, one.row)
            elif isinstance(one, Text):
                faults.remark(one.place, _not_used(one.unused))
        batch = [one for one in batch if isinstance(one, Text)]
    for ids, loss in _texts(request, batch) if encoder is None else _records(encoder, batch, faults):
        yield ids.astype(dtype), loss


def _texts(request: Request, batch: Sequence[Any]) -> Iterator[_Found]:
    for document, ids in zip(batch, _encoded(request, batch), strict=True):
        if not len(ids):
            fault = f"{document.place} is a document without a token"
            raise DataError(Problem(request.place, fault, "remove it"))
        whole, _ = document_of(request.tokenizer, ids)
        if lack := lacking(request.tokenizer, whole, request.vocab_size):
            fix = f"set model.vocab_size to at least {request.tokenizer.vocab_size}, or use the model's own tokenizer"
            raise DataError(Problem(request.place, f"{document.place} has {lack}", fix))
        yield whole, _NO_LOSS


def _records(encoder: RowEncoder, batch: Sequence[Any], faults: Faults) -> Iterator[_Found]:
    for record, encoded in zip(batch, encoder.encode([record.row for record in batch]), strict=True):
        if isinstance(encoded, RowFault):
            faults.add(record.place, encoded)
        else:
            faults.remark(record.place, encoded.remarks | _not_used(record.unused))
            yield encoded.ids, encoded.loss


def _not_used(columns: Iterable[str]) -> set[str]:
    return {f"column {name} is not used" for name in columns}


def _encoded(request: Request, batch: Sequence[Text]) -> list[NDArray[np.int64]]:
    try:
        return request.tokenizer.encode_batch([document.text for document in batch])
    except NotEncodable as error:
        if len(batch) > 1 and not isinstance(error, TooSlow):  # finds the document that fails
            return [ids for document in batch for ids in _encoded(request, [document])]
        others = f" to {batch[-1].place}" if len(batch) > 1 else ""
        fault = f"the tokenizer cannot encode {batch[0].place}{others}: {error}"
        raise DataError(Problem(request.place, fault, "remove it, or use a tokenizer that can encode it")) from error


def batches(documents: Iterable[Text | Record]) -> Iterator[list[Any]]:
    """Yields lists of documents, neither of many nor of much text."""
    batch: list[Text | Record] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) if isinstance(document, Text) else _text_of(document.row)
        if len(batch) == _BATCH or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _text_of(row: object) -> int:
    """Returns the characters of a row's texts, down to those of its messages."""
    if isinstance(row, str):
        return len(row)
    if isinstance(row, Mapping):
        return sum(map(_text_of, row.values()))
    return sum(map(_text_of, row)) if isinstance(row, list) else 0
