"""One snapshot file in shared memory: written in place from a snapshot, sealed, read back."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypp.crc32 import crc32
from raypp.errors import CheckpointError, Problem
from raypp.stages.parallel.host_copies import lock_pages, unlock_pages
from raypp.state.checkpoint.commit import ObjectRecord, read_extra
from raypp.state.checkpoint.ranged_reads import CheckpointFile, ObjectInMemory
from raypp.state.checkpoint.snapshot import Snapshot
from raypp.state.checkpoint.tensor_file import block_digests, decode_header
from raypp.state.memory.files import (
    CONTROL_BYTES,
    Control,
    SlotName,
    close_unlocked,
    open_locked,
    open_shared,
    read_control,
    remove,
    tail_offset,
    write_control,
)
from raypp.untrusted.documents import Bounds, parse_as

FORMAT = 3


class Slot:
    """A locked file that this process writes, and its mapped memory. Locked until `close`."""

    def __init__(self, path: Path, name: SlotName, descriptor: int) -> None:
        self.path = path
        self.name = name
        self._descriptor = descriptor
        self._data: Tensor | None = None
        self._about: Mapping[str, Any] = {}
        self._registered = 0

    @classmethod
    def create(cls, directory: Path, name: SlotName) -> Slot:
        """Creates an empty file. Raises OSError: the file cannot be created."""
        path = directory / replace(name, step=None).file_name()
        remove(path)  # a leftover of a dead process
        descriptor = open_locked(path, create=True)
        assert descriptor is not None
        return cls(path, replace(name, step=None), descriptor)

    @classmethod
    def open(cls, path: Path, name: SlotName) -> Slot | None:
        """Opens an existing file; None if it is gone or in use."""
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

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        """Reads control block and tail; None if they are torn, or the file is incomplete."""
        return _read(self._descriptor, self.name.step)

    def memory(self, size: int, pinned: bool = False) -> Tensor:
        """Maps the data as a uint8 tensor `[size]` and allocates its memory at once. `pinned`:
        page-locks the memory for CUDA, which makes copies from a device faster. Raises OSError:
        there is not enough memory. Without the early allocation, a missing page would kill the
        process later, when it is written."""
        if self._data is None or self._data.numel() < size:
            self._unmap()
            room = max(1, size)  # a rank may train nothing, and torch maps no empty buffer
            os.posix_fallocate(self._descriptor, 0, max(tail_offset(room), os.fstat(self._descriptor).st_size))
            mapped = mmap.mmap(self._descriptor, CONTROL_BYTES + room)
            self._data = torch.frombuffer(mapped, dtype=torch.uint8, count=room, offset=CONTROL_BYTES)
        if pinned and not self._registered:
            self._registered = self._data.data_ptr() if lock_pages(self._data) else -1
        return self._data[:size]

    def begin(self, name: SlotName, about: Mapping[str, Any]) -> None:
        """Marks the file as incomplete; must be called before its memory is written. `about`: what
        its control block says of the snapshot so far."""
        self._rename(replace(name, step=None))
        self._about = about
        write_control(self._descriptor, {**about, "format": FORMAT, "complete": False})

    def seal(self, snapshot: Snapshot, step: int, extra: str) -> None:
        """Completes the file with the headers of a snapshot that was taken into its memory.
        `snapshot`: its copy must be done. `extra`: the trainer's own JSON."""
        objects, tail, crc, end = [], b"", 0, 0
        about = {"run": self.name.run, "step": step, "attempt": self.name.attempt, "rank": self.name.rank}
        for index, part in enumerate(snapshot.parts):
            if part.entries:
                digests = snapshot.digests(index)
                header = part.writer.encode(digests, about)
                objects.append((part.begin, part.size, len(header)))
                crc = crc32(digests.encode(), crc)
                tail, end = tail + header, part.begin + part.size
        facts = {"step": step, "objects": objects, "data_size": end, "data_crc": crc}
        self.complete({**self._about, **facts}, tail + extra.encode())

    def complete(self, control: Mapping[str, Any], tail: bytes) -> None:
        """Writes the tail, then the control block, then the name."""
        os.pwrite(self._descriptor, tail, tail_offset(control["data_size"]))
        facts = {"tail_size": len(tail), "tail_crc": crc32(tail), "format": FORMAT, "complete": True}
        write_control(self._descriptor, {**control, **facts})
        self._rename(replace(self.name, step=control["step"]))

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

    def _unmap(self) -> None:
        if self._registered > 0:
            unlock_pages(self._registered)
        self._registered = 0
        self._data = None  # the mapping is freed with its last tensor


class StoredSlot:
    """A complete snapshot as its readers see it, here or received from another node.

    Args:
        tail: Headers and the trainer's JSON.
        data: The data sections; None if they are not here.

    Attributes:
        files: The objects, for `load_checkpoint.Load`.
        sources: Their bytes. Without `data` they have none yet.

    Raises:
        CheckpointError: A header or the JSON is not valid; names the rank and the step.
    """

    def __init__(self, control: Mapping[str, Any], tail: bytes, data: memoryview | None = None) -> None:
        self.control, self.tail, self.data = control, tail, data
        who, place = snapshot_name(control["rank"], control["step"]), 0
        self.files: list[CheckpointFile] = []
        self.sources: list[ObjectInMemory] = []
        for number, (begin, size, header_size) in enumerate(control["objects"], 1):
            key = f"{who}, object {number}," if number > 1 else who
            if begin + size > control["data_size"]:
                raise CheckpointError(Problem(key, f"ends at byte {begin + size} of {control['data_size']}"))
            header = tail[place : place + header_size]
            place += header_size
            record = ObjectRecord(key, header_size + size, "", control["rank"], header_size)
            source = ObjectInMemory([] if data is None else [(0, data[begin : begin + size])])
            self.sources.append(source)
            self.files.append(CheckpointFile(record, decode_header(header, key, record.size), source))
        self.extra: dict[str, Any] = parse_as(dict[str, Any], tail[place:], who, Bounds())
        read_extra(self.extra, who)


@contextlib.contextmanager
def reading(path: Path, name: SlotName) -> Iterator[StoredSlot]:
    """Opens a complete snapshot beside other readers, and yields it as a `StoredSlot`. Raises
    CheckpointError: it is gone, in use, or torn; names the rank and the step."""
    who = snapshot_name(name.rank, name.step or 0)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_shared(path))
        except BlockingIOError:
            raise CheckpointError(Problem(who, "is in use")) from None
        except OSError:
            raise CheckpointError(Problem(who, "is gone")) from None
        content = _read(descriptor, name.step)
        if content is None or content[0]["rank"] != name.rank:
            raise CheckpointError(Problem(who, "is torn"))
        control, tail = content
        size = CONTROL_BYTES + control["data_size"]
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        yield StoredSlot(control, tail, memoryview(mapped)[CONTROL_BYTES:])


def snapshot_name(rank: int, step: int) -> str:
    """Returns what errors call a rank's snapshot."""
    return f"rank {rank}'s snapshot of step {step}"


def checksum(data: memoryview, control: Mapping[str, Any]) -> int:
    """Returns the CRC-32 of the digests of all blocks, as in the headers: `data_crc`."""
    value = 0
    for begin, size, _ in control["objects"]:
        value = crc32(block_digests(data[begin : begin + size]).encode(), value)
    return value


def _read(descriptor: int, step: int | None) -> tuple[dict[str, Any], bytes] | None:
    """Reads control block and tail of a complete snapshot of a step; None for any other."""
    control = read_control(descriptor)
    if control is None or (control.get("complete"), control.get("format"), control.get("step")) != (True, FORMAT, step):
        return None
    if control.keys() < Control.__annotations__.keys():
        return None
    tail = os.pread(descriptor, control["tail_size"], tail_offset(control["data_size"]))
    return (control, tail) if crc32(tail) == control["tail_crc"] else None
