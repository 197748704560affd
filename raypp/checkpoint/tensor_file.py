"""One rank's object: a safetensors file with one data buffer and a checksum for every block.

`__metadata__["raypp"]` is JSON: the position of each tensor in its global one, and the CRC-32 (8
hex digits) of each block of `BLOCK_BYTES` of the data, so that a reader can verify the part it
needs. It imports no torch, because commands read headers too.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from raypp.errors import CheckpointError, Problem, in_words

BLOCK_BYTES = 64 << 10
"""Readers fetch whole blocks, so each slice of a tensor costs up to one block more than needed."""
_DIGITS = 8
"""Hex digits of a CRC-32. Blocks use CRC-32 instead of SHA-256 because it is 2.5 times as fast and
only has to detect accidents."""
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: Global name.
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
    shape: tuple[int, ...]
    begin: int
    end: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    python: str = ""


@dataclass(frozen=True)
class FileHeader:
    """A file without its data.

    Attributes:
        entries: In the order of their bytes, without gaps.
        blocks: One digest per block of the data section.
        about: Further fields from the writer (run, step, attempt, rank).
        size: Bytes of length field and header, which is where the data section starts.
        block_bytes: Size of each block but the last.
    """

    entries: tuple[TensorEntry, ...]
    blocks: tuple[str, ...]
    about: dict[str, Any]
    size: int
    block_bytes: int = BLOCK_BYTES

    def check_block(self, index: int, data: memoryview, key: str) -> None:
        """Raises CheckpointError, which names the object, if a block is not what was written."""
        if block_digest(data) != self.blocks[index]:
            start = self.size + index * self.block_bytes
            raise CheckpointError(
                Problem(
                    key,
                    f"is corrupt between bytes {start} and {start + len(data)}",
                    "use an older checkpoint (a resume does so by itself)",
                )
            )


def block_digest(data: memoryview) -> str:
    return _hex(zlib.crc32(data))


def _hex(crc: int) -> str:
    return f"{crc:0{_DIGITS}x}"


class BlockSums:
    """The CRC-32 of every block of a data section, each computed by the first thread that needs it.

    Args:
        data: The data section; must not change.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._crcs: list[int | None] = [None] * -(-len(data) // BLOCK_BYTES)

    def digests(self) -> str:
        """Returns the digests of all blocks, concatenated as in the header."""
        return "".join(_hex(self._block(index)) for index in range(len(self._crcs)))

    def crc32(self, start: int, end: int, before: int = 0) -> int:
        """Continues the CRC-32 `before` over bytes [start, end) of the section.

        Does not read whole blocks again: combines their CRC-32s.
        """
        crc, place = before, start
        while place < end:
            upto = min(end, place - place % BLOCK_BYTES + BLOCK_BYTES)
            if upto - place == BLOCK_BYTES:
                crc = _after_block(crc) ^ self._block(place // BLOCK_BYTES)
            else:
                crc = zlib.crc32(self._data[place:upto], crc)
            place = upto
        return crc

    def _block(self, index: int) -> int:
        crc = self._crcs[index]
        if crc is None:
            crc = zlib.crc32(self._data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
            self._crcs[index] = crc
        return crc


def _after_block(crc: int) -> int:
    """Returns what a CRC-32 contributes to that of its bytes followed by one block.

    The contribution is linear in the CRC's bits, so one table for each of its bytes suffices.
    """
    first, second, third, fourth = _tables()
    return first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]


@cache
def _tables() -> tuple[list[int], ...]:
    block = bytes(BLOCK_BYTES)
    nothing = zlib.crc32(block)
    bits = [zlib.crc32(block, 1 << bit) ^ nothing for bit in range(32)]
    tables = []
    for place in range(0, 32, 8):
        table = [0] * 256
        for bit in range(8):
            for low in range(1 << bit):
                table[1 << bit | low] = table[low] ^ bits[place + bit]
        tables.append(table)
    return tuple(tables)


def encode_header(
    entries: list[TensorEntry], data: memoryview, about: dict[str, Any], sums: BlockSums | None = None
) -> bytes:
    """Encodes length field and header of a file with these entries over this data section."""
    return _encode(entries, (sums or BlockSums(data)).digests(), about)


def header_size(entries: list[TensorEntry], data_size: int, about: dict[str, Any]) -> int:
    """Returns the size of `encode_header`'s result without reading the data."""
    return len(_encode(entries, "0" * (_DIGITS * -(-data_size // BLOCK_BYTES)), about))


def _encode(entries: list[TensorEntry], blocks: str, about: dict[str, Any]) -> bytes:
    layout = {
        entry.name: {
            "shape": entry.global_shape,
            "offset": entry.offset,
            **({"python": entry.python} if entry.python else {}),
        }
        for entry in entries
    }
    raypp = {**about, "tensors": layout, "block_bytes": BLOCK_BYTES, "blocks": blocks}
    document: dict[str, Any] = {"__metadata__": {"format": "pt", "raypp": json.dumps(raypp, separators=(",", ":"))}}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [entry.begin, entry.end],
        }
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def decode_header(data: bytes, key: str) -> FileHeader:
    """Decodes length field and header.

    Raises:
        CheckpointError: The header is not raypp's; the message names the object.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        raypp = json.loads(document.pop("__metadata__")["raypp"])
        layout, digests, block_bytes = raypp.pop("tensors"), raypp.pop("blocks"), int(raypp.pop("block_bytes"))
        unknown = {saved["dtype"] for saved in document.values()} - ELEMENT_BYTES.keys()
        if unknown or block_bytes < 1:
            raise ValueError(f"dtype {unknown.pop()}" if unknown else f"blocks of {block_bytes} bytes")
        entries = [
            TensorEntry(
                name=name,
                dtype=saved["dtype"],
                shape=tuple(saved["shape"]),
                begin=saved["data_offsets"][0],
                end=saved["data_offsets"][1],
                global_shape=tuple(layout[name]["shape"]),
                offset=tuple(layout[name]["offset"]),
                python=layout[name].get("python", ""),
            )
            for name, saved in document.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            Problem(
                key, f"has no valid header: {in_words(error)}", "use an older checkpoint (a resume does so by itself)"
            )
        ) from error
    blocks = tuple(digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS))
    return FileHeader(tuple(sorted(entries, key=lambda entry: entry.begin)), blocks, raypp, 8 + length, block_bytes)
