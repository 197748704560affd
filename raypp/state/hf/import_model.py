"""Imports a Hugging Face model as a run's checkpoint of step 0.

Works without torch and holds one object's data in memory at a time.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.family import Shape
from raypp.job.models import DecoderOptions
from raypp.records import ONE_RANK
from raypp.state.checkpoint.commit import (
    Commit,
    ObjectRecord,
    claim_next_attempt,
    job_identity,
    list_checkpoints,
    write_commit,
)
from raypp.state.checkpoint.layout import rank_key
from raypp.state.checkpoint.run_spec import write_spec
from raypp.state.checkpoint.tensor_file import TensorEntry, encode_header
from raypp.state.hf.model_files import HfFiles, matching_tensors
from raypp.state.hf.names import HfPart, hf_parts, model_tensors
from raypp.state.hf.tensor import HfTensor
from raypp.storage import AlreadyExists, ObjectStore
from raypp.untrusted.safetensors_header import ELEMENT_BYTES

OBJECT_BYTES = 256 << 20
"""Maximum tensor data of one object, which is in memory at once."""


@dataclass
class _Object:
    """An object under construction: some rows of some tensors, each at most once."""

    entries: list[TensorEntry] = field(default_factory=list)
    reads: list[tuple[HfTensor, int, int]] = field(default_factory=list)
    size: int = 0


def import_hf(
    files: HfFiles,
    store: ObjectStore,
    run: str,
    options: DecoderOptions,
    job: Mapping[str, Any],
    *,
    progress: Callable[[int], None] = lambda _bytes: None,
    object_bytes: int = OBJECT_BYTES,
) -> Commit:
    """Starts a run with a committed checkpoint of step 0 that holds the weights, in their dtype.

    `raypp submit --resume` continues it with a new optimizer, from the start of the data.

    Args:
        job: Saved as the run's spec.json: the resolved job, or the part of it that is decided.
        object_bytes: Maximum tensor data in one object.

    Raises:
        CheckpointError: Tensors do not fit the model; names them. Nothing was written.
        AlreadyExists, JobError: The run exists already, or it trains adapters only.
        StoreError: A store failed. Without COMMIT, the written objects are not a checkpoint.
    """
    if options.lora is not None:
        fault = "a run that trains adapters keeps its frozen weights out of its checkpoints"
        raise JobError(Problem("model.lora", fault, f"set model.from_hf to {files.store.url}, and submit the job"))
    shapes = model_tensors(options)
    there = matching_tensors(files, shapes)
    if list_checkpoints(store, run):
        raise JobError(Problem("name", f"{run} already has checkpoints at {store.url}", "import under another name"))
    try:
        write_spec(store, run, job)
    except AlreadyExists as error:
        raise AlreadyExists(Problem("name", error.problems[0].fault, "import under another name")) from None
    attempt = claim_next_attempt(store, run)
    records = []
    for number, part in enumerate(_objects(shapes, there, object_bytes)):
        records.append(_store(files, store, rank_key(run, 0, attempt, number), number, part))
        progress(part.size)
    commit = Commit(
        run, 0, attempt, ONE_RANK.as_dict(), job_identity(job), {"imported_from": files.store.url}, tuple(records)
    )
    write_commit(store, commit)
    return commit


def _objects(shapes: Mapping[str, Shape], there: Mapping[str, HfTensor], object_bytes: int) -> Iterator[_Object]:
    """Distributes the rows of all tensors over objects of at most `object_bytes`. Each holds at
    least one row or expert. Widest elements come first, so that slices are aligned."""
    names = list(shapes)

    def width(name: str) -> int:
        return ELEMENT_BYTES[there[next(hf_parts(name, shapes[name])).name].dtype]

    filled = _Object()
    for name in sorted(names, key=width, reverse=True):
        shape = shapes[name]
        parts = list(hf_parts(name, shape))
        dtype = one_dtype([there[part.name] for part in parts])
        row = prod(shape[1:]) * ELEMENT_BYTES[dtype]
        done = 0
        while done < shape[0]:
            count = min(shape[0] - done, max((object_bytes - filled.size) // row, 0 if filled.size else 1))
            if count == 0:
                yield filled
                filled = _Object()
                continue
            _add(filled, name, dtype, shape, done, count, row)
            filled.reads += list(_reads(parts, there, done, done + count))
            done += count
    if filled.size:
        yield filled


def one_dtype(tensors: list[HfTensor]) -> str:
    """Returns the dtype of a layer's experts, which are stacked. Raises JobError: dtypes differ."""
    kinds = sorted({tensor.dtype for tensor in tensors})
    if len(kinds) > 1:
        fault = f"experts of {' and '.join(kinds)} cannot be stacked"
        raise JobError(Problem(tensors[0].name, fault, "convert the model to one dtype"))
    return kinds[0]


def _add(filled: _Object, name: str, dtype: str, shape: Shape, first: int, count: int, row: int) -> None:
    begin, filled.size = filled.size, filled.size + count * row
    offset = (first, *(0 for _ in shape[1:]))
    filled.entries.append(TensorEntry(name, dtype, (count, *shape[1:]), begin, filled.size, shape, offset))


def _reads(
    parts: list[HfPart], there: Mapping[str, HfTensor], first: int, last: int
) -> Iterator[tuple[HfTensor, int, int]]:
    """Yields the file tensors and rows that hold the rows `[first, last)` of a global tensor."""
    if parts[0].expert is None:
        yield there[parts[0].name], first, last
        return
    for part in parts[first:last]:
        yield there[part.name], 0, part.shape[0]


def _store(files: HfFiles, store: ObjectStore, key: str, number: int, part: _Object) -> ObjectRecord:
    data = bytearray(part.size)
    at = 0
    for tensor, first, last in part.reads:
        piece = files.read(tensor, first, last)
        data[at : at + len(piece)] = piece
        at += len(piece)
    run = key.partition("/")[0]
    header = encode_header(part.entries, memoryview(data), {"run": run, "step": 0, "rank": number})
    digest = hashlib.sha256(header)
    digest.update(data)
    size = len(header) + len(data)
    store.put_stream(key, [header, memoryview(data)], size)
    return ObjectRecord(key, size, digest.hexdigest(), number, len(header), hashlib.sha256(header).hexdigest())
