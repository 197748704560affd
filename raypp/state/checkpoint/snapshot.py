"""Copies the state to host memory while training continues: the one writer of snapshots.

The copy overlaps the next step's forwards and backwards; only the next change of the copied tensors
waits for it (`before_update`). It runs on a stream of its own on a GPU, in a thread on the CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from raypp.stages.parallel.host_copies import CopyStreams, HostMemory
from raypp.stages.parallel.rank_groups import check_groups
from raypp.stages.pipeline.device_clock import DeviceClock, Span
from raypp.state.checkpoint.state import DTYPES, Slice, dtype_name
from raypp.state.checkpoint.tensor_file import HeaderWriter, TensorEntry, block_digests

Allocate = Callable[[int, bool], Tensor]
"""(bytes, whether it receives device copies, for which pinned memory is faster) -> a uint8 tensor
of at least that many elements."""


_ALIGNED = 64
"""Objects of a snapshot begin at multiples of this many bytes, so that views of any dtype fit."""


class _Copy:
    """A copy that may still be in progress."""

    def __init__(self, queued: tuple[CopyStreams, Any] | None, rest: Callable[[], None] | None) -> None:
        self.queued = queued
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if rest is not None:
            self._thread = threading.Thread(target=self._run, args=(rest,), name="raypp-snapshot", daemon=True)
            self._thread.start()

    def _run(self, rest: Callable[[], None]) -> None:
        try:
            rest()
        except Exception as error:  # noqa: BLE001 - raised in `wait`
            self._error = error

    def wait(self) -> None:
        """Waits until it is done; raises the error it failed with."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        if self.queued is not None:
            self.queued[1].synchronize()

    def hold_updates(self) -> None:
        """Orders the caller's next changes of the copied tensors after the copy."""
        if self.queued is not None:
            copies, event = self.queued
            copies.wait(event)
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True)
class Part:
    """An object's data section in a snapshot, from byte `begin` on. `entries`: slices' places."""

    entries: list[TensorEntry]
    begin: int
    size: int

    @cached_property
    def writer(self) -> HeaderWriter:
        """Encodes the object's header."""
        return HeaderWriter(self.entries)


@dataclass
class Snapshot:
    """A copy of a rank's slices, laid out as the data sections of objects. Valid until everybody
    who uses it has called `release`; the buffer is then reused. `held`: the time that the next
    update of the tensors waited for the copy; None before it."""

    parts: list[Part]
    _buffer: Tensor
    _copy: _Copy
    _owner: SnapshotBuffer
    held: Span | None = None
    _users: int = 1
    _digests: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _summing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def entries(self) -> list[TensorEntry]:
        """The slices of the first object."""
        return self.parts[0].entries

    @property
    def held_s(self) -> float:
        """The seconds of `held`; 0 before the update, and while a device has not reached it."""
        return (self.held.seconds or 0.0) if self.held is not None else 0.0

    def data(self) -> memoryview:
        """Waits for the copy and returns the bytes; raises the error the copy failed with. Raises
        DistBackendError: an NCCL communicator failed, so the bytes may be wrong."""
        if not self._users:
            raise RuntimeError("this snapshot was released")
        self._copy.wait()
        check_groups()
        return self._buffer.numpy().data

    def digests(self, index: int) -> str:
        """Waits for the copy and returns the checksums of an object's blocks, computed once."""
        data, part = self.data(), self.parts[index]
        with self._summing:
            if index not in self._digests:
                self._digests[index] = block_digests(data[part.begin : part.begin + part.size])
            return self._digests[index]

    def share(self) -> Snapshot:
        """Returns the snapshot for one more user, who must call `release`, too. It may have been
        released, if its buffer has not been used again."""
        with self._lock:
            self._users += 1
            self._owner._busy = True
        return self

    def release(self) -> None:
        """Gives the snapshot up; the last user waits for the copy and returns the buffer."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._owner._free(self._copy)


@dataclass(frozen=True)
class _Plan:
    """The position of each slice in a buffer, and the device that slices are copied from."""

    groups: tuple[Iterable[Slice], ...]
    parts: list[Part]
    pairs: list[tuple[Tensor, Slice]]
    device: torch.device
    buffer: Tensor


class SnapshotBuffer:
    """Host memory that is allocated once and reused for one snapshot after the other. `allocate`:
    allocates the memory; None for memory of its own, page-locked if a slice lies on a CUDA device.
    Called again only if a snapshot needs more memory."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or self._own_memory
        self._own: HostMemory | None = None
        self._memory: Tensor | None = None
        self._copies: CopyStreams | None = None
        self._last: Snapshot | None = None
        self._plan: _Plan | None = None
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a snapshot has been taken and not released."""
        return self._busy

    def close(self) -> None:
        """Frees its memory until the next snapshot. Call it while none is in use. Idempotent."""
        if self._own is not None:
            self._own.close()
        self._memory = self._plan = None

    def take(self, *groups: Iterable[Slice]) -> Snapshot:
        """Starts to copy the slices; until it is done, call `before_update` before any change.
        Slices that may change without an optimizer step (`Slice.moving`) are copied before this
        returns. If all groups are the same list objects as last time, their layout is reused.
        Raises RuntimeError: the last snapshot is still in use."""
        if self._busy:
            raise RuntimeError("the last snapshot is still in use; release it first")
        known = self._plan
        if known is None or not same_objects(known.groups, groups):
            known = self._plan = self._lay_out(groups)
        plan, self._busy = known, True
        try:
            copy = self._copy(plan.pairs, plan.device)
        except BaseException:
            self._busy = False
            raise
        self._last = Snapshot(plan.parts, plan.buffer, copy, self)
        return self._last

    def _lay_out(self, groups: tuple[Iterable[Slice], ...]) -> _Plan:
        parts, every, places, size = [], [], [], 0
        for group in groups:
            # Widest first: aligns tensors without gaps, as safetensors does.
            ordered = sorted(group, key=lambda part: (-part.tensor.element_size(), part.name))
            begin = -(-size // _ALIGNED) * _ALIGNED
            entries, length = _layout(ordered)
            parts.append(Part(entries, begin, length))
            places += [(begin + entry.begin, begin + entry.end, entry) for entry in entries]
            every += ordered
            size = begin + length
        device = next((part.tensor.device for part in every if part.tensor.device.type != "cpu"), torch.device("cpu"))
        if device.type == "cpu" and any(part.tensor.is_pinned() for part in every):
            # Page-locked memory is written by a device's copies (`train.optimizer_offload`).
            device = torch.device("cuda", torch.cuda.current_device())
        buffer = self._sized(size, device.type == "cuda")
        views = [buffer[first:last].view(DTYPES[entry.dtype]).view(entry.shape) for first, last, entry in places]
        return _Plan(groups, parts, list(zip(views, every, strict=True)), device, buffer)

    def before_update(self, *_unused: Any) -> None:
        """Waits for the copy. An optimizer's pre-hook: must run before the tensors change."""
        last, self._last = self._last, None
        if last is None:
            return

        def note(span: Span) -> None:
            last.held = span

        # The host does not wait for a device's copy: the device's own clock says how long it stood.
        queued = last._copy.queued
        with DeviceClock(torch.device("cpu") if queued is None else queued[0].device).timed(note):
            last._copy.hold_updates()

    def _copy(self, pairs: list[tuple[Tensor, Slice]], device: torch.device) -> _Copy:
        """Copies slices into views `[...]` of the buffer, on a device's stream or in a thread."""
        queued = None
        if device.type != "cpu":
            self._copies = copies = self._copies or CopyStreams(device)
            host = [(view, part) for view, part in pairs if part.tensor.device.type == "cpu"]
            event = copies.to_host([(view, part.tensor) for view, part in pairs if part.tensor.device.type != "cpu"])
            queued = copies, event
            if any(part.moving for _, part in pairs):
                copies.wait(event)
        else:
            for view, part in pairs:
                if part.moving:
                    view.copy_(part.tensor)
            host = [(view, part) for view, part in pairs if not part.moving]

        def rest() -> None:
            if queued is not None:
                torch.get_device_module(device).set_device(device)  # a new thread would use device 0, and its memory
                event.synchronize()  # what is in host memory has been copied there by then
            self._copy_still(host)

        return _Copy(queued, rest if host else None)

    def _copy_still(self, pairs: list[tuple[Tensor, Slice]]) -> None:
        for view, part in pairs:
            view.copy_(part.tensor)

    def _own_memory(self, size: int, pinned: bool) -> Tensor:
        self.close()
        self._own = HostMemory(torch.device("cuda" if pinned else "cpu"))
        return self._own.allocate(size)

    def _sized(self, size: int, pinned: bool) -> Tensor:
        """Returns uint8 `[size]` of the buffer, which grows if it is too small."""
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            self._memory = self._allocate(size, pinned)
        return self._memory[:size]

    def _free(self, copy: _Copy) -> None:
        with contextlib.suppress(Exception):  # `data` reports a failure; here only the end of writing matters
            copy.wait()
        self._busy = False


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two sequences hold the same objects, not only equal ones."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _layout(slices: list[Slice]) -> tuple[list[TensorEntry], int]:
    entries, begin = [], 0
    for part in slices:
        end = begin + part.tensor.numel() * part.tensor.element_size()
        shape = tuple(part.tensor.shape)
        entries.append(
            TensorEntry(
                part.name,
                dtype_name(part.tensor.dtype, part.name),
                shape,
                begin,
                end,
                part.global_shape,
                part.offset,
                part.python,
            )
        )
        begin = end
    return entries, begin
