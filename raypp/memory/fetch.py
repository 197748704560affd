"""Chooses which snapshots an attempt restores, and fetches each rank's snapshot.

`choose` is pure: it maps what every rank sees on its node to the newest step that all ranks can
restore. `fetch_snapshot` opens a rank's snapshot on its own node, or receives the copy that another
node holds. Metadata travels as JSON over the CPU process group, never as a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypp.errors import CheckpointError
from raypp.memory.copy_messages import LARGEST_FACTS, parse_facts
from raypp.memory.files import LARGEST_DATA, SlotName, keeper, peek
from raypp.memory.slot import Slot, checksum
from raypp.memory.tier import MemoryTier

_ARRIVED = 9
"""Slot number, in the file name, of a snapshot received from another node."""


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one step of one attempt, a candidate to resume from.

    Attributes:
        step: Number of completed optimizer steps.
        attempt: The attempt that took the snapshots.
        holders: For each rank, the ranks on whose node its snapshot lies.
        committed: The newest commit that was known when the snapshots were taken.
    """

    step: int
    attempt: int
    holders: dict[int, list[int]]
    committed: int

    def source(self, owner: int) -> int:
        """Returns the rank that provides `owner`'s snapshot: `owner` itself if its node has one."""
        return owner if owner in self.holders[owner] else min(self.holders[owner])


def choose(seen: Sequence[Sequence[Sequence[int]]], newest_commit: int) -> tuple[Snapshots | None, str]:
    """Returns the snapshots to resume from, or None and the reason why there are none.

    Args:
        seen: By rank, the snapshots it sees, each as attempt, step, rank whose state it is, and
            the newest commit known when it was taken.
        newest_commit: Step of the newest commit in the store.
    """
    found: dict[tuple[int, int], Snapshots] = {}
    for rank, snapshots in enumerate(seen):
        for attempt, step, owner, committed in snapshots:
            known = found.setdefault((step, attempt), Snapshots(step, attempt, {}, committed))
            known.holders.setdefault(owner, []).append(rank)
            found[step, attempt] = replace(known, committed=max(known.committed, committed))
    newer = [found[key] for key in sorted(found, reverse=True) if key[0] > newest_commit]
    if not newer:
        return None, "memory has no snapshot" if not found else "no snapshot in memory is newer"
    gone_back = [one for one in newer if one.committed > newest_commit]
    if len(gone_back) == len(newer):
        why = f"step {gone_back[0].committed} was committed but is gone: snapshots taken after it are not used"
        return None, why
    newer = [one for one in newer if one.committed <= newest_commit]
    whole = next((one for one in newer if all(rank in one.holders for rank in range(len(seen)))), None)
    if whole is not None:
        return whole, ""
    missing = [rank for rank in range(len(seen)) if rank not in newer[0].holders]
    ranks = f"rank {missing[0]}'s snapshot" if len(missing) == 1 else f"the snapshots of ranks {missing}"
    return None, f"{ranks} of step {newer[0].step} {'is' if len(missing) == 1 else 'are'} in no memory"


def snapshots_here(tier: MemoryTier, damaged: set[Path]) -> list[tuple[SlotName, Path, dict[str, Any]]]:
    """Returns the complete snapshots of this job that lie on this node."""
    found = []
    for name, path in tier.earlier():
        if name.step is None or path in damaged:
            continue
        about = peek(path)
        facts = (name.rank, name.step, name.attempt, tier.life.job, True)
        keys = ("rank", "step", "attempt", "job", "complete")
        if about is not None and "committed" in about and tuple(about.get(key) for key in keys) == facts:
            found.append((name, path, about))
    return found


def fetch_snapshot(
    tier: MemoryTier, best: Snapshots, here: Sequence[tuple[SlotName, Path, dict[str, Any]]], damaged: set[Path]
) -> Slot:
    """Returns this rank's snapshot, from its own node or from its partner's node.

    Also sends the snapshots that other ranks need from this one. All ranks go through the owners in
    the same order, so that sends and receives match.

    Raises:
        ValueError: This rank's snapshot, or one it had to send, is missing or damaged.
    """
    me = tier.seat.rank
    own: Slot | None = None
    failure = ""
    for owner in range(tier.seat.world_size):
        source = best.source(owner)
        if me not in (owner, source):
            continue
        try:
            if source == owner:
                own = _open(best, owner, here, damaged)
            elif me == source:
                _give(best, owner, here, damaged)
            else:
                own = _receive(tier, best, source)
        except (OSError, ValueError) as error:
            failure = str(error)
    if own is None or failure:
        if own is not None:
            own.close()
        raise ValueError(failure)
    return own


def _open(
    best: Snapshots, owner: int, here: Sequence[tuple[SlotName, Path, dict[str, Any]]], damaged: set[Path]
) -> Slot:
    """Opens and verifies a snapshot on this node.

    Raises:
        ValueError: No intact snapshot exists. Damaged ones are added to `damaged`.
    """
    wanted = (best.attempt, best.step, owner)
    why = "it is gone"
    for name, path, _ in here:
        if (name.attempt, name.step, name.rank) != wanted or path in damaged:
            continue
        slot = Slot.open(path, name)
        if slot is not None and slot.verify() is not None:
            return slot
        damaged.add(path)
        why = "it is gone" if slot is None else "its bytes are not those that were written"
        if slot is not None:
            slot.close(delete=True)  # it is useless, and other ranks on this node would offer it again
    raise ValueError(why)


def _give(
    best: Snapshots, owner: int, here: Sequence[tuple[SlotName, Path, dict[str, Any]]], damaged: set[Path]
) -> None:
    """Sends a snapshot to its owner, which runs `_receive`; sends zero sizes if there is none.

    A snapshot that the owner refuses is added to `damaged`: it is not offered again.
    """
    try:
        slot = _open(best, owner, here, damaged)
    except (OSError, ValueError):
        dist.send(torch.zeros(2, dtype=torch.int64), owner)
        return
    control = slot.control() or {}
    facts = bytearray(json.dumps(control).encode() + b"\n" + (slot.tail(control) or b""))
    data = slot.memory(control["data_size"])
    dist.send(torch.tensor([len(facts), data.numel()]), owner)
    for part in (torch.frombuffer(facts, dtype=torch.uint8), data):
        if not _heard(owner):
            break
        send_bytes(part, owner)
    else:
        if _heard(owner):
            slot.close()
            return
    damaged.add(slot.path)
    slot.close()


def _receive(tier: MemoryTier, best: Snapshots, source: int) -> Slot:
    """Receives this rank's snapshot from another node into a file on this node.

    Answers each part, so that the sender sends nothing unneeded and does not offer a refused
        snapshot again.

    Raises:
        ValueError: The holder no longer has an intact snapshot, or it arrived damaged.
    """
    who = f"rank {source}'s node"
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, source)
    length, size = (int(one) for one in sizes)
    if not length:
        raise ValueError(f"its copy on {who} is not intact")
    slot: Slot | None = None
    try:
        if not (0 < length <= LARGEST_FACTS and 0 <= size <= LARGEST_DATA):
            raise ValueError(f"{who} announces {length} and {size} bytes")
        _say(True, source)
        facts = torch.zeros(length, dtype=torch.uint8)
        receive_bytes(facts, source)
        about, tail = parse_facts(facts.numpy().tobytes(), size, best.step, tier.seat.rank, who)
        about["keeper"] = keeper()
        name = SlotName(tier.life.run, tier.life.life, best.attempt, tier.seat.rank, "own", _ARRIVED)
        try:
            slot = Slot.create(tier.directory, name)
            data = slot.memory(size)
        except OSError as error:
            raise ValueError(f"there is no room for it: {error}") from None
        _say(True, source)
        receive_bytes(data, source)
        if checksum(data) != about["data_crc"]:
            raise ValueError("it arrived damaged")
    except (ValueError, CheckpointError) as error:
        _say(False, source)
        if slot is not None:
            slot.close(delete=True)
        raise ValueError(str(error)) from None
    _say(True, source)
    slot.begin(name, about)
    slot.seal(best.step, about, size, tail)
    return slot


def _say(wanted: bool, to: int) -> None:
    """Answers a part of a snapshot: whether the next one is wanted, or the last one arrived."""
    dist.send(torch.tensor([int(wanted)]), to)


def _heard(source: int) -> bool:
    """Receives the answer of `_say`."""
    answer = torch.zeros(1, dtype=torch.int64)
    dist.recv(answer, source)
    return bool(answer)


def gather_json(value: Any) -> list[Any]:
    """Gathers a value from every rank, in rank order. Collective over the world.

    Args:
        value: Anything that JSON can represent.
    """
    data = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    said = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(said, padded)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(said, sizes, strict=True)]


def from_rank_zero(value: Any) -> Any:
    """Returns rank 0's value and ignores the others'. Collective over the world."""
    return gather_json(value if dist.get_rank() == 0 else None)[0]


def send_bytes(tensor: torch.Tensor, to: int, piece: int = 64 << 20) -> None:
    """Sends a uint8 tensor `[N]` in pieces; the receiver calls `receive_bytes` with the same N."""
    for start in range(0, tensor.numel(), piece):
        dist.send(tensor[start : start + piece], to)


def receive_bytes(tensor: torch.Tensor, source: int, piece: int = 64 << 20) -> None:
    """Fills a uint8 tensor `[N]` with what `send_bytes` sends."""
    for start in range(0, tensor.numel(), piece):
        dist.recv(tensor[start : start + piece], source)
