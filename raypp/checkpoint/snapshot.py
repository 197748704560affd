"""A copy of the state in host memory, taken while training stands still for as short as possible."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raypp.checkpoint.state import Slice
from raypp.checkpoint.tensor_file import TensorEntry


@dataclass
class Snapshot:
    """A copy of a rank's slices, laid out as the data section of its file.

    Valid until `release`; the buffer behind it is then used again.
    """

    entries: list[TensorEntry]
    stall_s: float
    _buffer: Tensor
    _copied: torch.cuda.Event | None
    _owner: SnapshotBuffer
    _released: bool = field(default=False)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._buffer.numel()

    def data(self) -> memoryview:
        """The bytes. Waits for a copy from a device that is still under way."""
        if self._released:
            raise RuntimeError("this snapshot was released")
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffer.numpy().data

    def release(self) -> None:
        """Gives the buffer back; may be called twice."""
        if not self._released:
            self._released = True
            self._owner._free()


class SnapshotBuffer:
    """Host memory that is taken once and used for one snapshot after the other (pinned for CUDA).

    On CUDA the copies run on a stream of their own: the host does not wait for them, and of the device's
    work only the next change of the copied tensors must (`before_update`).
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._busy = False

    @property
    def busy(self) -> bool:
        """A snapshot is out and not yet released."""
        return self._busy

    def take(self, slices: Iterable[Slice]) -> Snapshot:
        """Copies the slices.

        Raises:
            RuntimeError: The last snapshot is still in use.
        """
        if self._busy:
            raise RuntimeError("the last snapshot is still in use; release it first")
        started = time.perf_counter()
        ordered = _in_file_order(slices)
        entries, size = _layout(ordered)
        on_cuda = any(part.tensor.is_cuda for part in ordered)
        buffer = self._sized(size, on_cuda)
        self._busy = True
        try:
            views = [buffer[entry.begin : entry.end].view(entry.dtype).view(entry.shape) for entry in entries]
            self._copied = self._copy_on_stream(ordered, views) if on_cuda else None
            if not on_cuda:
                for view, part in zip(views, ordered, strict=True):
                    view.copy_(part.tensor)
        except BaseException:
            self._busy = False
            raise
        return Snapshot(entries, time.perf_counter() - started, buffer, self._copied, self)

    def before_update(self, *_unused: Any) -> None:
        """Must run before the copied tensors are changed in place: an optimizer's step pre-hook."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _copy_on_stream(self, slices: list[Slice], views: list[Tensor]) -> torch.cuda.Event:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for view, part in zip(views, slices, strict=True):
                view.copy_(part.tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def _sized(self, size: int, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:size]

    def _free(self) -> None:
        self._busy = False


def _in_file_order(slices: Iterable[Slice]) -> list[Slice]:
    """Widest elements first: every tensor is aligned without gaps, as safetensors itself does it."""
    return sorted(slices, key=lambda part: (-part.tensor.element_size(), part.name))


def _layout(slices: list[Slice]) -> tuple[list[TensorEntry], int]:
    entries, begin = [], 0
    for part in slices:
        end = begin + part.tensor.numel() * part.tensor.element_size()
        shape = tuple(part.tensor.shape)
        entries.append(
            TensorEntry(part.name, part.tensor.dtype, shape, begin, end, part.global_shape, part.offset, part.python)
        )
        begin = end
    return entries, begin
