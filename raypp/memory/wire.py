"""What travels with the copy of a snapshot, checked before it is used. No torch.

A copy is a frame, the control block of the snapshot's file as JSON, its tail, and the data of its
tensors. Between two attempts the control block and the tail travel together (`parse_facts`).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Len

from raypp.errors import CheckpointError
from raypp.memory.files import CONTROL_BYTES
from raypp.untrusted.documents import Bounds, parse_as

LARGEST_TAIL = 256 << 20
LARGEST_FACTS = CONTROL_BYTES + 1 + LARGEST_TAIL
LARGEST_DATA = 1 << 44
LARGEST_STEP = 10**12 - 1
"""As many digits as a file's name may have."""
_FRAME = struct.Struct("<QQII")
FRAME_BYTES = _FRAME.size
_BOUNDS = Bounds(CONTROL_BYTES, 64)

_Crc = Annotated[int, Ge(0), Le(2**32 - 1)]
_Name = Annotated[str, Len(0, 128)]


@dataclass(frozen=True)
class CopyControl:
    """The control block of a complete snapshot, as `Slot.seal` writes it."""

    run: _Name
    life: _Name
    job: _Name
    attempt: Annotated[int, Ge(0), Le(10**9)]
    rank: Annotated[int, Ge(0), Le(10**7)]
    committed: Annotated[int, Ge(-1), Le(LARGEST_STEP)]
    keeper: Annotated[list[float], Len(2, 2)]
    data_size: Annotated[int, Ge(0), Le(LARGEST_DATA)]
    data_crc: _Crc
    tail_size: Annotated[int, Ge(0), Le(LARGEST_TAIL)]
    tail_crc: _Crc
    format: int
    complete: Literal[True]
    step: Annotated[int, Ge(0), Le(LARGEST_STEP)]


@dataclass(frozen=True)
class Frame:
    """Begins a copy.

    Attributes:
        step: The snapshot's step.
        size: Bytes of data.
        control_size: Bytes of the control block.
        tail_size: Bytes of the tail.
    """

    step: int
    size: int
    control_size: int
    tail_size: int

    def to_bytes(self) -> bytes:
        return _FRAME.pack(self.step, self.size, self.control_size, self.tail_size)


def parse_frame(data: bytes, who: str) -> Frame:
    """Reads `FRAME_BYTES` bytes.

    Raises:
        CheckpointError: A number is too large; names `who`.
    """
    frame = Frame(*_FRAME.unpack(data))
    limits = (LARGEST_STEP, LARGEST_DATA, CONTROL_BYTES, LARGEST_TAIL)
    values = (frame.step, frame.size, frame.control_size, frame.tail_size)
    if any(value > limit for value, limit in zip(values, limits, strict=True)):
        raise CheckpointError(f"{who} sent a frame that says {frame}: too large")
    return frame


def parse_control(text: bytes, frame: Frame, owner: int, who: str) -> dict[str, Any]:
    """Reads the control block that follows a frame.

    Args:
        text: The JSON.
        frame: The frame.
        owner: The rank whose snapshot it must be.
        who: Names the sender in errors.

    Raises:
        CheckpointError: It is no control block, or does not agree with the frame.
    """
    control = asdict(parse_as(CopyControl, text, f"the control block from {who}", _BOUNDS))
    said = {"rank": owner, "step": frame.step, "data_size": frame.size, "tail_size": frame.tail_size}
    for key, value in said.items():
        if control[key] != value:
            raise CheckpointError(f"{who} sent a control block whose {key} is {control[key]}, not {value}")
    return control


def parse_facts(data: bytes, size: int, step: int, owner: int, who: str) -> tuple[dict[str, Any], bytes]:
    """Reads control block and tail of a snapshot that another node sends back.

    Args:
        data: The JSON of the control block, a line feed, and the tail.
        size: Bytes of data that the sender announced.
        step: The step that was asked for.
        owner: The rank whose snapshot was asked for.
        who: Names the sender in errors.

    Raises:
        CheckpointError: They are torn, or of another snapshot.
    """
    text, _, tail = data.partition(b"\n")
    control = parse_control(text, Frame(step, size, len(text), len(tail)), owner, who)
    if zlib.crc32(tail) != control["tail_crc"]:
        raise CheckpointError(f"the tail from {who} arrived damaged")
    return control, tail
