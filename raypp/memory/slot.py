"""One snapshot file in shared memory, mapped as a tensor: written in place, sealed, read back."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import FailFast
from torch import Tensor
from typing_extensions import TypedDict

from raypp.checkpoint.extra import read_extra
from raypp.checkpoint.tensor_file import TensorEntry
from raypp.crc32 import crc32
from raypp.errors import CheckpointError
from raypp.memory.files import (
    CONTROL_BYTES,
    LARGEST_TAIL,
    SlotName,
    close_unlocked,
    open_locked,
    read_control,
    remove,
    tail_offset,
    write_control,
)
from raypp.untrusted.documents import Bounds, parse_as, shown
from raypp.untrusted.safetensors_header import ELEMENT_BYTES

log = logging.getLogger(__name__)

FORMAT = 1
_CHECK_BYTES = 8 << 20
_SIZES = ("data_size", "data_crc", "tail_size", "tail_crc")
TAIL = Bounds(size=LARGEST_TAIL, values=1_000_000)
"""Of a tail: about 60,000 tensors."""


class Slot:
    """A locked file and its mapped memory. The lock is held until `close`.

    Args:
        path: Path of the file.
        name: The parsed file name.
        descriptor: File descriptor, open and locked.
    """

    def __init__(self, path: Path, name: SlotName, descriptor: int) -> None:
        self.path = path
        self.name = name
        self._descriptor = descriptor
        self._data: Tensor | None = None
        self._registered = 0

    @classmethod
    def create(cls, directory: Path, name: SlotName) -> Slot:
        """Creates an empty file.

        Raises:
            OSError: The file cannot be created.
        """
        path = directory / replace(name, step=None).file_name()
        remove(path)  # a leftover of a dead process
        descriptor = open_locked(path, create=True)
        if descriptor is None:
            raise FileExistsError(f"{path} was removed or is held by another process")
        return cls(path, replace(name, step=None), descriptor)

    @classmethod
    def open(cls, path: Path, name: SlotName) -> Slot | None:
        """Opens an existing file; None if it is gone or a living process holds it."""
        descriptor = open_locked(path)
        return None if descriptor is None else cls(path, name, descriptor)

    @property
    def step(self) -> int | None:
        """The step of the complete snapshot in the file; None if it holds none."""
        return self.name.step

    @property
    def capacity(self) -> int:
        """Number of data bytes mapped in this process."""
        return 0 if self._data is None else self._data.numel()

    def control(self) -> dict[str, Any] | None:
        """Reads the control block; None if it is torn or says that the file is incomplete."""
        about = read_control(self._descriptor)
        if about is None or about.get("complete") is not True or about.get("format") != FORMAT:
            return None
        if about.get("step") != self.name.step or any(key not in about for key in _SIZES):
            return None
        end = tail_offset(about["data_size"]) + about["tail_size"]
        return about if end <= os.fstat(self._descriptor).st_size else None

    def memory(self, size: int, pinned: bool = False) -> Tensor:
        """Maps the data section as a uint8 tensor `[size]` and allocates its memory at once.

        Args:
            pinned: Page-locks the memory for CUDA, which makes copies from a device faster.

        Raises:
            OSError: There is not enough memory. Without the early allocation, a missing page would
                kill the process later, when it is written.
        """
        if self._data is None or self._data.numel() < size:
            self._unmap()
            room = max(1, size)  # a rank may train nothing, and torch maps no empty buffer
            os.posix_fallocate(self._descriptor, 0, max(tail_offset(room), os.fstat(self._descriptor).st_size))
            mapped = mmap.mmap(self._descriptor, CONTROL_BYTES + room)
            self._data = torch.frombuffer(mapped, dtype=torch.uint8, count=room, offset=CONTROL_BYTES)
        if pinned and not self._registered:
            self._register()
        return self._data[:size]

    def begin(self, name: SlotName, about: Mapping[str, Any]) -> None:
        """Marks the file as incomplete; must be called before its memory is written."""
        self._rename(replace(name, step=None))
        write_control(self._descriptor, {**about, "format": FORMAT, "complete": False})

    def seal(self, step: int, about: Mapping[str, Any], size: int, tail: bytes) -> dict[str, Any]:
        """Completes the file: writes the tail, then the control block, then the name.

        Args:
            about: Further fields of the control block.
            size: Bytes of data. Their checksum is computed here unless `about` contains it.

        Returns:
            The control block.
        """
        os.pwrite(self._descriptor, tail, tail_offset(size))
        crc = about["data_crc"] if "data_crc" in about else checksum(self.memory(size))
        facts = {"data_size": size, "data_crc": crc, "tail_size": len(tail), "tail_crc": crc32(tail)}
        control = {**about, **facts, "format": FORMAT, "complete": True, "step": step}
        write_control(self._descriptor, control)
        self._rename(replace(self.name, step=step))
        return control

    def tail(self, control: Mapping[str, Any]) -> bytes | None:
        """Reads the tail; None if it does not match its checksum."""
        data = os.pread(self._descriptor, control["tail_size"], tail_offset(control["data_size"]))
        return data if crc32(data) == control["tail_crc"] else None

    def verify(self) -> dict[str, Any] | None:
        """Checks every byte; returns the control block if all checksums match, else None."""
        control = self.control()
        if control is None or self.tail(control) is None:
            return None
        return control if checksum(self.memory(control["data_size"])) == control["data_crc"] else None

    def close(self, *, delete: bool = False) -> None:
        """Releases memory and lock; keeps the file unless `delete`. Idempotent."""
        if self._descriptor < 0:
            return
        if delete:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self._unmap()
        close_unlocked(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        # A leaked lock would keep the next attempt in this process from using its own snapshot.
        if self._descriptor >= 0:
            close_unlocked(self._descriptor)

    def _rename(self, name: SlotName) -> None:
        goal = self.path.with_name(name.file_name())
        if goal != self.path:
            self.path.rename(goal)
        self.path, self.name = goal, name

    def _register(self) -> None:
        """Page-locks the memory for CUDA. Best effort: on failure, copies are only slower."""
        assert self._data is not None
        address = self._data.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, self._data.numel(), 0)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            self._registered = address
        else:
            log.warning("cannot page-lock shared memory (CUDA error %d): snapshots take longer", int(error))
            self._registered = -1

    def _unmap(self) -> None:
        if self._registered > 0:
            torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
        self._registered = 0
        self._data = None  # the mapping is freed with its last tensor


def checksum(data: Tensor) -> int:
    """Returns the CRC-32 of a uint8 tensor `[N]`; releases the GIL while it computes."""
    view = data.numpy().data
    value = 0
    for start in range(0, len(view), _CHECK_BYTES):
        value = crc32(view[start : start + _CHECK_BYTES], value)
    return value


def encode_layout(entries: Sequence[TensorEntry]) -> str:
    """Returns the entries as JSON text."""
    return json.dumps([asdict(entry) for entry in entries], separators=(",", ":"))


def encode_tail(layout: str, extra: str) -> bytes:
    """Encodes the tail: where each tensor lies, and the trainer's own JSON."""
    return f'{{"tensors":{layout},"extra":{extra}}}'.encode()


class _Tail(TypedDict):
    tensors: Annotated[list[TensorEntry], FailFast()]
    extra: dict[str, Any]


def decode_tail(tail: bytes, data_size: int) -> tuple[list[TensorEntry], dict[str, Any]]:
    """Decodes the tail into entries and the trainer's own values.

    Args:
        data_size: Bytes of the data section, in which all tensors must lie.

    Raises:
        ValueError: It is not one.
    """
    try:
        document = parse_as(_Tail, tail, "", TAIL, kind="a snapshot's tail")
        read_extra(document["extra"], "extra")
    except CheckpointError as error:
        raise ValueError(error.problems[0].what) from None
    for entry in document["tensors"]:
        fault = entry.fault()
        if not fault and (entry.end > data_size or entry.begin % ELEMENT_BYTES[entry.dtype]):
            fault = f"bytes {entry.begin} to {entry.end} are not those of a tensor in {data_size} bytes"
        if fault:
            raise ValueError(f"{shown(entry.name)}: {fault}")
    return document["tensors"], document["extra"]
