"""One rank's object: a safetensors file with one data buffer and a checksum for every block.

`__metadata__["raypp"]` is JSON: the position of each tensor in its global one, and the CRC-32 (8
hex digits) of each block of `BLOCK_BYTES` of the data, so that a reader can verify the part it
needs. It imports no torch, because commands read headers too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, NoReturn, NotRequired

import numpy as np
from annotated_types import Ge, Le
from typing_extensions import TypedDict

from raypp.crc32 import crc32
from raypp.errors import CheckpointError, Problem
from raypp.state.checkpoint.layout import ADVICE
from raypp.untrusted.documents import Bounds, Count, parse_as, shown
from raypp.untrusted.safetensors_header import ELEMENT_BYTES, LENGTH_BYTES, MOST_BYTES, parse_header

OPTIMIZER = "optim/"
"""Begins the names of the optimizer's tensors: `optim/<parameter>/<key>`."""
BLOCK_BYTES = 64 << 10
"""Readers fetch whole blocks, so each slice of a tensor costs up to one block more than needed."""
_DIGITS = 8
"""Hex digits of a CRC-32. Blocks use CRC-32 instead of SHA-256 because it is 2.5 times as fast and
only has to detect accidents."""
BOUNDS = Bounds(MOST_BYTES, values=1_000_000)
"""Of a header: about 60,000 tensors, and the checksums of 800 GB."""
Shape = tuple[Count, ...]
_PYTHON = ("", "int", "float", "bool")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: safetensors name of its dtype (`F32`).
        shape: Shape of the slice in this file.
        begin: First byte in the data section.
        end: One past its last byte.
        global_shape: Shape of the whole tensor.
        offset: Where the slice begins in the whole tensor.
        python: See `state.Slice`.
    """

    name: str
    dtype: str
    shape: Shape
    begin: Count
    end: Count
    global_shape: Shape
    offset: Shape
    python: str = ""

    def fault(self) -> str:
        """Returns what is wrong with the figures; empty if they fit each other."""
        if self.dtype not in ELEMENT_BYTES or self.python not in _PYTHON:
            return f"dtype {shown(self.dtype)} and type {shown(self.python)} are not known"
        if not len(self.shape) == len(self.offset) == len(self.global_shape):
            return (
                f"shape, offset and global shape have {len(self.shape)}, {len(self.offset)} and "
                f"{len(self.global_shape)} dimensions"
            )
        if any(first + size > of for first, size, of in zip(self.offset, self.shape, self.global_shape, strict=True)):
            return f"shape {list(self.shape)} at {list(self.offset)} is not within {list(self.global_shape)}"
        if self.end - self.begin != prod(self.shape) * ELEMENT_BYTES[self.dtype]:
            return f"{self.dtype} of shape {list(self.shape)} does not take bytes {self.begin} to {self.end}"
        return ""


@dataclass(frozen=True)
class FileHeader:
    """A file without its data. `entries`: in the order of their bytes, without gaps. `blocks`: the
    digests of the blocks of the data section, concatenated. `size`: bytes before the data section.
    `block_bytes`: size of each block but the last."""

    entries: tuple[TensorEntry, ...]
    blocks: str
    about: dict[str, Any]
    size: int
    block_bytes: int = BLOCK_BYTES

    def check_block(self, index: int, data: memoryview, key: str) -> None:
        """Raises CheckpointError, which names the object, if a block is not what was written."""
        if block_digest(data) != self.blocks[index * _DIGITS : (index + 1) * _DIGITS]:
            start = self.size + index * self.block_bytes
            raise CheckpointError(Problem(key, f"is corrupt between bytes {start} and {start + len(data)}", ADVICE))


def block_digest(data: memoryview) -> str:
    return f"{crc32(data):0{_DIGITS}x}"


def block_digests(data: memoryview) -> str:
    """Returns the digests of all blocks of a data section, concatenated as in the header."""
    return "".join(block_digest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))


class HeaderWriter:
    """Encodes the headers of files with the same tensors; encodes the tensors once."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._count = len(entries)
        places, tensors = {}, {}
        for entry in entries:
            python = {"python": entry.python} if entry.python else {}
            places[entry.name] = {"shape": entry.global_shape, "offset": entry.offset, **python}
            tensors[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
        self._places, self._tensors = _in_text(f'"tensors":{_json(places)},'), _json(tensors)[1:]

    def encode(self, blocks: str, about: dict[str, Any]) -> bytes:
        """Returns length field and header. `blocks`: the digests of the blocks of the data section,
        concatenated. Raises CheckpointError: the header is larger than any reader accepts."""
        start = _json(about)[:-1] + ("," if about else "")
        end = f'"block_bytes":{BLOCK_BYTES},"blocks":"{blocks}"}}'
        raypp = f'"{_in_text(start)}{self._places}{_in_text(end)}"'
        more = "," if self._count else ""
        header = f'{{"__metadata__":{{"format":"pt","raypp":{raypp}}}{more}{self._tensors}'.encode()
        if not BOUNDS.hold(header):
            fault = f"a rank's {self._count:,} tensors need a larger header than any reader accepts"
            raise CheckpointError(fault, "spread the layers over more pipeline stages")
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header


def encode_header(entries: Sequence[TensorEntry], data: memoryview, about: dict[str, Any]) -> bytes:
    """Encodes length field and header of a file with these entries over this data section."""
    return HeaderWriter(entries).encode(block_digests(data), about)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _in_text(json_text: str) -> str:
    """Returns a piece of JSON as it stands in a JSON string."""
    return json.dumps(json_text)[1:-1]


class _Place(TypedDict):
    """Where a tensor lies in its global one."""

    shape: Shape
    offset: Shape
    python: NotRequired[str]


class _Metadata(TypedDict):
    tensors: dict[str, _Place]
    blocks: str
    block_bytes: Annotated[int, Ge(_DIGITS), Le(1 << 30)]


def decode_header(data: bytes, key: str, object_size: int) -> FileHeader:
    """Decodes length field and header. Raises CheckpointError: the header is not raypp's, or does
    not describe the object's bytes; the message names the object and the tensor."""

    def refuse(reason: str) -> NoReturn:
        raise CheckpointError(Problem(key, f"has no valid header: {reason}", ADVICE))

    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < LENGTH_BYTES or len(data) - LENGTH_BYTES != length:
        refuse(f"it says that it has {length} bytes; it has {max(0, len(data) - LENGTH_BYTES)}")
    header = parse_header(data[LENGTH_BYTES:], object_size - len(data), key, fix=ADVICE)
    if (metadata := header.metadata.get("raypp")) is None:
        refuse("__metadata__.raypp is missing")
    about = parse_as(
        _Metadata, metadata.encode(), f"{key} __metadata__.raypp", BOUNDS, fix=ADVICE, kind="valid", unknown="allow"
    )
    block_bytes, blocks, places = about["block_bytes"], about["blocks"], about["tensors"]
    writer = {name: value for name, value in about.items() if name not in _Metadata.__annotations__}
    entries = []
    for name, tensor in header.tensors.items():
        if (place := places.get(name)) is None:
            refuse(f"{shown(name)} has no place")
        entry = TensorEntry(name, *tensor, place["shape"], place["offset"], place.get("python", ""))
        if fault := entry.fault():
            refuse(f"{shown(name)}: {fault}")
        entries.append(entry)
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            refuse(f"{shown(entry.name)} begins at byte {entry.begin}, but the tensor before it ends at {end}")
        end = entry.end
    if len(data) + end != object_size:
        refuse(f"the tensors end at byte {len(data) + end}, but the object has {object_size}")
    if len(blocks) != _DIGITS * -(-end // block_bytes):
        refuse(f"it has {len(blocks) / _DIGITS:g} checksums of blocks of {block_bytes} for {end} bytes")
    return FileHeader(tuple(entries), blocks, writer, len(data), block_bytes)


Box = tuple[tuple[int, int], ...]
"""Begin and end per dimension, in the global tensor."""
_MOST_CELLS = 1 << 20


def volume(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def cover_once(boxes: Sequence[Box], whole: Box) -> bool:
    """Returns whether every element of a box lies in exactly one of these boxes."""
    if sum(volume(box) for box in boxes) != volume(whole):
        return False
    if len(boxes) < 2:
        return True
    # The volumes add up, so boxes without overlaps leave no gap. All edges together cut the whole
    # into cells, of which each box takes some.
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(whole))]
    places = [{edge: place for place, edge in enumerate(edges)} for edges in cuts]
    shape = [len(edges) - 1 for edges in cuts]
    if prod(shape) > _MOST_CELLS:
        return False  # no mesh cuts a tensor like that
    taken = np.zeros(shape, dtype=bool)
    for box in boxes:
        cells = taken[tuple(slice(at[begin], at[end]) for at, (begin, end) in zip(places, box, strict=True))]
        if cells.any():
            return False
        cells[...] = True
    return True
