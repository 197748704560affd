"""The files of one rank in one attempt: its own snapshots, and copies for other ranks."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raypp.checkpoint.snapshot import Snapshot, SnapshotBuffer
from raypp.checkpoint.state import Slice
from raypp.memory.files import (
    SlotName,
    keeper,
    list_slots,
    memory_directory,
    remove,
    remove_dead,
    room,
)
from raypp.memory.slot import Slot
from raypp.planning.decision import COPIES, TIER_SHARE
from raypp.records import Seat


@dataclass(frozen=True)
class RunLife:
    """Identifies the run whose snapshots an attempt may use.

    Attributes:
        run: The run's name.
        life: 12 hex digits derived from the run's location and its first attempt.
        job: Hash of the job's model, data and train sections and of a step's rows, in hex digits.
        layout: Hash of its mesh and pipeline, which decide which part of a state each rank has.
        secret: The secret of this attempt; never written anywhere.
    """

    run: str
    life: str
    job: str
    layout: str = ""
    secret: bytes = b""


class RankSlots:
    """Allocates, names, writes and removes the files. `MemoryTier` decides when."""

    def __init__(self, life: RunLife, seat: Seat) -> None:
        self.life, self.seat, self.directory = life, seat, memory_directory()
        self.slots: dict[Slot, SnapshotBuffer] = {}
        """The files for this rank's own snapshots, and what copies a state into each."""
        self._numbers: dict[Slot, int] = {}
        self._copies: dict[int, list[Slot]] = {}
        self._kept: tuple[int, Mapping[int, int]] = (0, {})
        self._keeper = keeper()
        remove_dead(self.directory)

    def earlier(self) -> list[tuple[SlotName, Path]]:
        """Returns this node's files of the run's earlier attempts, of any rank, complete or not."""
        return [
            (name, path)
            for name, path in list_slots(self.directory)
            if (name.run, name.life) == (self.life.run, self.life.life) and name.attempt < self.seat.attempt
        ]

    def keep(self, attempt: int, steps: Mapping[int, int]) -> None:
        """Keeps the files that other ranks, or this one, have restored, until `forget_earlier`.

        Removes all others of earlier attempts now: their sizes may not fit this mesh.

        Args:
            attempt: The attempt that wrote them.
            steps: By rank, the step of its snapshot.
        """
        self._kept = (attempt, steps)
        for name, path in self.earlier():
            if not self._is_kept(name):
                remove(path)

    def _is_kept(self, name: SlotName) -> bool:
        attempt, steps = self._kept
        return name.attempt == attempt and name.step is not None and steps.get(name.rank) == name.step

    def forget_earlier(self) -> None:
        """Removes the files of earlier attempts."""
        self._kept = (0, {})
        for _, path in self.earlier():
            remove(path)

    def room(self) -> int:
        """Returns how many bytes of host memory the ranks of this node may take."""
        kept = 0
        for name, path in self.earlier():
            with contextlib.suppress(OSError):
                kept += path.stat().st_blocks * 512 * self._is_kept(name)
        return max(0, int(TIER_SHARE * room(self.directory, self.life.run, self.life.life)) - kept)

    def take_memory(self, files: int, size: int) -> None:
        """Allocates `files` files of `size` bytes; reuses this rank's files of earlier attempts."""
        for name, path in self.earlier():
            mine = (name.rank, name.kind) == (self.seat.rank, "own") and not self._is_kept(name)
            if mine and len(self.slots) < files and (slot := Slot.open(path, name)) is not None:
                self.add(slot)
        while len(self.slots) < files:
            self.add(slot := Slot.create(self.directory, replace(self._blank, number=len(self._numbers))))
            slot.begin(slot.name, {"keeper": self._keeper})
        for slot in self.slots:
            slot.memory(size, pinned=self.seat.device == "cuda")

    def of_step(self, step: int | None) -> Slot:
        """Returns the file that holds this rank's snapshot of a step.

        An earlier attempt may have left another one, of a state that this attempt has not come
        through: the snapshot is that of this attempt, else the restored one, which was added first.
        """
        slots = [slot for slot in self.slots if slot.step == step]
        return next((slot for slot in slots if slot.name.attempt == self.seat.attempt), slots[0])

    def next(self, steps: set[int]) -> Slot:
        """Returns the file to write next: empty or the oldest, and of none of these steps."""
        idle = [slot for slot, buffer in self.slots.items() if not buffer.busy]  # first: one may be sealed meanwhile
        kept = [self.of_step(slot.step) for slot in idle if slot.step in steps]
        return min((slot for slot in idle if slot not in kept), key=_age)

    def copy(self, slot: Slot, slices: Sequence[list[Slice]], committed: int) -> Snapshot:
        """Begins a snapshot of the state in a file; the caller must pass the result to `seal`."""
        seat = self.seat
        about = {
            "run": self.life.run, "life": self.life.life, "job": self.life.job, "layout": self.life.layout,
            "mesh": list(seat.mesh_sizes.as_dict().values()), "attempt": seat.attempt, "rank": seat.rank,
            "committed": committed, "keeper": self._keeper,
        }  # fmt: skip
        slot.begin(replace(self._blank, number=self._numbers[slot]), about)
        return self.slots[slot].take(*slices)

    def before_update(self, *_unused: Any) -> None:
        """Waits for copies in progress. An optimizer's pre-hook."""
        for buffer in self.slots.values():
            buffer.before_update()

    def seal(self, slot: Slot, snapshot: Snapshot, step: int, extra: str) -> float:
        """Waits for the copy and completes the file; returns the CPU seconds of the latter."""
        try:
            snapshot.data()
            started = time.thread_time()
            slot.seal(snapshot, step, extra)
            return time.thread_time() - started
        finally:
            snapshot.release()

    def place_copy(self, owner: int, size: int) -> Slot:
        """Returns the slot for `owner`'s next copy: of its two slots, the empty or older one.

        Raises:
            OSError: There is no room for `size` bytes.
        """
        slots = self._copies.setdefault(owner, [])
        while len(slots) < COPIES:
            name = replace(self._blank, rank=owner, kind="copy", number=len(slots))
            slots.append(Slot.create(self.directory, name))
        slot = min(slots, key=_age)
        if size > slot.capacity and size > (there := room(self.directory, self.life.run, self.life.life)):
            raise OSError(errno.ENOSPC, f"a copy of {size / 1e6:.1f} MB for {there / 1e6:.1f} MB of memory")
        return slot

    def give_back(self, files: int, keep: set[int]) -> None:
        """Removes files of this rank until `files` are left, but none of the steps to `keep`."""
        spare = [slot for slot in self.slots if slot.step is None or slot.step not in keep]
        for slot in spare[: max(0, len(self.slots) - files)]:
            del self.slots[slot]
            slot.close(delete=True)

    def add(self, slot: Slot) -> None:
        """Adds a file to this rank's files."""
        self._numbers[slot] = len(self._numbers)
        self.slots = {**self.slots, slot: SnapshotBuffer(slot.memory)}  # the other thread may look through the last one

    def unlink(self) -> None:
        """Removes the files' names; threads may still use their memory."""
        for slot in self._all():
            with contextlib.suppress(OSError):
                slot.path.unlink()
        self.forget_earlier()

    def close(self, *, delete: bool) -> None:
        """Releases the files, which no thread may still use; removes them with `delete`."""
        slots = self._all()
        self.slots, self._copies = {}, {}
        for slot in slots:
            slot.close(delete=delete)
        if delete:
            self.forget_earlier()

    def _all(self) -> list[Slot]:
        return [*self.slots, *(slot for slots in self._copies.values() for slot in slots)]

    @property
    def _blank(self) -> SlotName:
        return SlotName(self.life.run, self.life.life, self.seat.attempt, self.seat.rank, "own", 0)


def _age(slot: Slot) -> int:
    return -1 if slot.step is None else slot.step
