"""What travels with the copy of a snapshot, checked before it is used. No torch.

A copy is a frame, the control block of the snapshot's file as JSON, its tail, and its data. Between
two attempts the control block and the tail travel together (`parse_facts`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from raypp.crc32 import crc32
from raypp.errors import CheckpointError
from raypp.memory.files import CONTROL_BYTES, LARGEST_DATA, LARGEST_STEP, LARGEST_TAIL, Control, decode_control
from raypp.untrusted.text import visible

_FRAME = struct.Struct("<QQII")
FRAME_BYTES = _FRAME.size


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
        CheckpointError: It is not a control block, or does not agree with the frame.
    """
    expected = {"rank": owner, "step": frame.step, "data_size": frame.size, "tail_size": frame.tail_size}
    return _control(text, expected, who)


def _control(text: bytes, expected: dict[str, int], who: str) -> dict[str, Any]:
    try:
        control = decode_control(text)
    except ValueError as error:
        raise CheckpointError(f"the control block from {who} {error}") from None
    if wrong := sorted(control.keys() ^ Control.__annotations__.keys()):
        unknown = "an unknown key" if wrong[0] in control else "no"
        raise CheckpointError(f"{who} sent a control block with {unknown} {visible(wrong[0])}")
    if not control["complete"]:
        raise CheckpointError(f"{who} sent the control block of an incomplete snapshot")
    for key, value in expected.items():
        if control[key] != value:
            raise CheckpointError(f"{who} sent a control block whose {key} is {control[key]}, not {value}")
    return control


def parse_facts(data: bytes, step: int, owner: int, who: str) -> tuple[dict[str, Any], bytes]:
    """Reads control block and tail of a snapshot that another node sends back.

    Args:
        data: The JSON of the control block, a line feed, and the tail.
        step: The step that was asked for.
        owner: The rank whose snapshot was asked for.
        who: Names the sender in errors.

    Raises:
        CheckpointError: They are torn, or of another snapshot.
    """
    text, _, tail = data.partition(b"\n")
    control = _control(text, {"rank": owner, "step": step, "tail_size": len(tail)}, who)
    if crc32(tail) != control["tail_crc"]:
        raise CheckpointError(f"the tail from {who} arrived damaged")
    return control, tail
