"""Reads the header of a safetensors file that others may have written. The file begins with the
length of the header (8 bytes, little endian), then the header, a JSON object, then the data.
https://huggingface.co/docs/safetensors describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, NoReturn

from raypp.errors import CheckpointError, Problem
from raypp.untrusted.documents import Bounds, parse_json, shown

LENGTH_BYTES = 8
"""Bytes of the length field."""
MOST_BYTES = 100 << 20
"""Largest header, in bytes; that of the format."""
MOST_TENSORS = 100_000
"""Most tensors in one file."""
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by safetensors' name of a dtype that raypp reads."""
_METADATA = "__metadata__"
_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_MOST_DIMS = 64  # as numpy and torch
_MOST_OTHERS = 100
_LARGEST = 2**63 - 1
_BOUNDS = Bounds(MOST_BYTES, 20 * MOST_TENSORS)  # 8 for a tensor, as many for what raypp adds


class StoredTensor(NamedTuple):
    """One tensor of a file. `dtype`: safetensors' name of its dtype (`F32`). `begin`: offset of its
    first byte in the data. `end`: one past its last byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header. `tensors`: by name, in the order of the header. Their bytes fit their
    shapes and do not overlap. `data_bytes`: bytes of data that the tensors need."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_bytes: int


def header_length(first: bytes, file_bytes: int | None, place: str, fix: str = "") -> int:
    """Returns the length of the header, without the length field. `first`: at least the first 8
    bytes of the file, if it has that many. `file_bytes`: size of the file; None if unknown. Raises
    CheckpointError: the file is too short, or the header too long."""
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(Problem(place, f"is not a safetensors file: it has {len(first)} bytes", fix))
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MOST_BYTES:
        fault = f"is not a safetensors file: its header would have {length:,} bytes; at most {MOST_BYTES:,} are read"
        raise CheckpointError(Problem(place, fault, fix))
    if file_bytes is not None and LENGTH_BYTES + length > file_bytes:
        fault = f"is torn: {file_bytes} bytes are there, its header alone ends at byte {LENGTH_BYTES + length}"
        raise CheckpointError(Problem(place, fault, fix))
    return length


def parse_header(text: bytes, data_bytes: int | None, place: str, fix: str = "") -> SafetensorsHeader:
    """Parses and checks the header's JSON. `text`: the header without the length field.
    `data_bytes`: bytes of the file after the header; None if unknown. Raises CheckpointError: the
    header is not JSON of this format; a tensor's bytes do not match its shape, overlap those of
    another, or end past the file."""
    others = 0

    def convert(pairs: list[tuple[str, Any]]) -> Any:
        """Makes a tensor of an object at once, because a dict takes several times the memory."""
        nonlocal others
        entries = dict(pairs)
        if len(pairs) == len(_KEYS) and entries.keys() == _KEYS:
            return _tensor(**entries)
        others += 1
        if others > _MOST_OTHERS:
            raise ValueError("it has too many objects that are not tensors")
        if len(entries) < len(pairs):
            names = sorted(key for key, _ in pairs)
            twice = next(one for one, other in pairwise(names) if one == other)
            raise ValueError(f"it has {shown(twice)} twice")
        return entries

    def fail(why: str) -> NoReturn:
        raise CheckpointError(Problem(place, f"is not a safetensors file: {why}", fix))

    document = parse_json(text, place, _BOUNDS, fix=fix, objects=convert)
    if not isinstance(document, dict):
        fail("its header is not a JSON object")
    metadata = document.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fail(f"{_METADATA} is not an object of texts")
    if len(document) > MOST_TENSORS:
        fail(f"it has {len(document):,} tensors; at most {MOST_TENSORS:,} are read")
    for name, tensor in document.items():
        if isinstance(tensor, str):  # what _tensor found
            fail(f"tensor {shown(name)}: {tensor}")
        if not isinstance(tensor, StoredTensor):
            fail(f"tensor {shown(name)} is not described by {', '.join(sorted(_KEYS))}")
    ordered = sorted(document.items(), key=lambda item: item[1][2:])
    for (one, before), (other, after) in pairwise(ordered):
        if after.begin < before.end:
            fail(f"tensors {shown(one)} and {shown(other)} overlap")
    needed = ordered[-1][1].end if ordered else 0
    if data_bytes is not None and needed > data_bytes:
        fault = f"is torn: {data_bytes} bytes of data are there, {shown(ordered[-1][0])} ends at byte {needed}"
        raise CheckpointError(Problem(place, fault, fix))
    return SafetensorsHeader(document, metadata, needed)


def _tensor(dtype: Any, shape: Any, data_offsets: Any) -> StoredTensor | str:
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        return f"raypp cannot read the dtype {shown(dtype)}"
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not _are_counts(shape):
        return f"shape is not a list of at most {_MOST_DIMS} whole numbers"
    if not isinstance(data_offsets, list) or len(data_offsets) != 2 or not _are_counts(data_offsets):
        return "data_offsets is not two whole numbers"
    begin, end = data_offsets
    needed = prod(shape) * ELEMENT_BYTES[dtype]
    if end - begin != needed:
        return f"its byte count {end - begin} does not match its shape ({dtype}, {shown(needed)} bytes)"
    return StoredTensor(dtype, tuple(shape), begin, end)


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= _LARGEST for value in values)
