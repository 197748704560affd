"""The files of one rank in one attempt: its own snapshots, and copies for other ranks."""

import contextlib
import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raypp.planning.decision import COPIES, TIER_SHARE
from raypp.records import Seat
from raypp.state.checkpoint.snapshot import Snapshot, SnapshotBuffer
from raypp.state.checkpoint.state import Slice
from raypp.state.memory.files import SlotName, keeper, list_slots, memory_directory, remove, remove_dead, room
from raypp.state.memory.slot import Slot


@dataclass(frozen=True)
class RunLife:
    """Identifies the run whose snapshots an attempt may use. `life`: 12 hex digits derived from the
    run's location and its first attempt. `job`: hash of the job's model, data and train sections
    and of a step's rows, in hex digits. `layout`: hash of its mesh and pipeline, which decide which
    part of a state each rank has. `secret`: the secret of this attempt; never written anywhere."""

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
        self._restored: tuple[int, Mapping[int, int]] = (0, {})
        self._keeper = keeper()
        remove_dead(self.directory)

    def files_of_earlier_attempts(self) -> list[tuple[SlotName, Path]]:
        """Returns this node's files of the run's earlier attempts, of any rank, complete or not."""
        return [
            (name, path)
            for name, path in list_slots(self.directory)
            if (name.run, name.life) == (self.life.run, self.life.life) and name.attempt < self.seat.attempt
        ]

    def keep_restored(self, attempt: int, steps: Mapping[int, int]) -> None:
        """Keeps restored files until `remove_earlier_files`, and removes others of earlier attempts
        now, whose sizes may not fit this mesh. `steps`: by rank, the step of its snapshot."""
        self._restored = (attempt, steps)
        for name, path in self.files_of_earlier_attempts():
            if not self._is_restored(name):
                remove(path)

    def _is_restored(self, name: SlotName) -> bool:
        attempt, steps = self._restored
        return name.attempt == attempt and name.step is not None and steps.get(name.rank) == name.step

    def remove_earlier_files(self) -> None:
        self._restored = (0, {})
        for _, path in self.files_of_earlier_attempts():
            remove(path)

    def room(self) -> int:
        """Returns how many bytes of host memory the ranks of this node may take."""
        kept = 0
        for name, path in self.files_of_earlier_attempts():
            with contextlib.suppress(OSError):
                kept += path.stat().st_blocks * 512 * self._is_restored(name)
        return max(0, int(TIER_SHARE * room(self.directory, self.life.run, self.life.life)) - kept)

    def allocate_files(self, files: int, size: int) -> None:
        """Allocates `files` files of `size` bytes; reuses this rank's files of earlier attempts."""
        for name, path in self.files_of_earlier_attempts():
            is_own = (name.rank, name.kind) == (self.seat.rank, "own") and not self._is_restored(name)
            if is_own and len(self.slots) < files and (slot := Slot.open(path, name)) is not None:
                self.add(slot)
        while len(self.slots) < files:
            self.add(slot := Slot.create(self.directory, replace(self._blank, number=len(self._numbers))))
            slot.begin(slot.name, {"keeper": self._keeper})
        for slot in self.slots:
            slot.memory(size, pinned=self.seat.device == "cuda")

    def slot_of_step(self, step: int | None) -> Slot:
        """Returns the file that holds this rank's snapshot of a step. An earlier attempt may have
        left another one, of a state that this attempt has not come through: the snapshot is that of
        this attempt, else the restored one, which was added first."""
        slots = [slot for slot in self.slots if slot.step == step]
        return next((slot for slot in slots if slot.name.attempt == self.seat.attempt), slots[0])

    def next_slot(self, steps: set[int]) -> Slot:
        """Returns the file to write next: empty or the oldest, and of none of these steps."""
        idle = [slot for slot, buffer in self.slots.items() if not buffer.busy]  # first: one may be sealed meanwhile
        kept = [self.slot_of_step(slot.step) for slot in idle if slot.step in steps]
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

    def slot_for_copy(self, owner: int, size: int) -> Slot:
        """Returns the slot for `owner`'s next copy: of its two slots, the empty or older one.
        Raises OSError: there is no room for `size` bytes."""
        slots = self._copies.setdefault(owner, [])
        while len(slots) < COPIES:
            name = replace(self._blank, rank=owner, kind="copy", number=len(slots))
            slots.append(Slot.create(self.directory, name))
        slot = min(slots, key=_age)
        if size > slot.capacity and size > (free := room(self.directory, self.life.run, self.life.life)):
            raise OSError(errno.ENOSPC, f"a copy of {size / 1e6:.1f} MB for {free / 1e6:.1f} MB of memory")
        return slot

    def remove_spare_files(self, files: int, keep: set[int]) -> None:
        """Removes files of this rank until `files` are left, but none of the steps to `keep`."""
        spare = [slot for slot in self.slots if slot.step is None or slot.step not in keep]
        for slot in spare[: max(0, len(self.slots) - files)]:
            del self.slots[slot]
            slot.close(delete=True)

    def add(self, slot: Slot) -> None:
        self._numbers[slot] = len(self._numbers)
        self.slots = {**self.slots, slot: SnapshotBuffer(slot.memory)}  # the other thread may look through the last one

    def unlink(self) -> None:
        """Removes the files' names; threads may still use their memory."""
        for slot in self._all():
            with contextlib.suppress(OSError):
                slot.path.unlink()
        self.remove_earlier_files()

    def close(self, *, delete: bool) -> None:
        """Releases the files, which no thread may still use; removes them with `delete`."""
        slots = self._all()
        self.slots, self._copies = {}, {}
        for slot in slots:
            slot.close(delete=delete)
        if delete:
            self.remove_earlier_files()

    def _all(self) -> list[Slot]:
        return [*self.slots, *(slot for slots in self._copies.values() for slot in slots)]

    @property
    def _blank(self) -> SlotName:
        return SlotName(self.life.run, self.life.life, self.seat.attempt, self.seat.rank, "own", 0)


def _age(slot: Slot) -> int:
    return -1 if slot.step is None else slot.step
