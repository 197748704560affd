"""A rank's snapshot comes to its rank: from a file of its node, or from the copy that another node holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypp.memory.choice import Snapshots
from raypp.memory.exchange import receive_bytes, send_bytes
from raypp.memory.files import SlotName, keeper, peek
from raypp.memory.slot import Slot, checksum
from raypp.memory.tier import MemoryTier

_ARRIVED = 9
"""Number, in its name, of a snapshot that came from another node."""


def snapshots_here(tier: MemoryTier, damaged: set[Path]) -> list[tuple[SlotName, Path, dict[str, Any]]]:
    """The whole snapshots of this job that lie on this node."""
    found = []
    for name, path in tier.earlier():
        if name.step is None or path in damaged:
            continue
        about = peek(path)
        facts = (name.rank, name.step, name.attempt, tier.life.job, True)
        keys = ("rank", "step", "attempt", "job", "complete")
        if about is not None and tuple(about.get(key) for key in keys) == facts:
            found.append((name, path, about))
    return found


def fetch_snapshot(
    tier: MemoryTier, best: Snapshots, here: Sequence[tuple[SlotName, Path, dict[str, Any]]], damaged: set[Path]
) -> Slot:
    """This rank's own snapshot, from its node or from its partner's; gives others theirs. All in one order."""
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
    """A verified snapshot of this node.

    Raises:
        ValueError: None is whole; those that are not are added to `damaged`.
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
            slot.close(delete=True)  # nobody can use it; others on this node would offer it
    raise ValueError(why)


def _give(
    best: Snapshots, owner: int, here: Sequence[tuple[SlotName, Path, dict[str, Any]]], damaged: set[Path]
) -> None:
    """The holder's side of `_receive`; says so when it has none."""
    try:
        slot = _open(best, owner, here, damaged)
    except (OSError, ValueError):
        dist.send(torch.zeros(2, dtype=torch.int64), owner)
        return
    control = slot.control() or {}
    facts = json.dumps(control).encode() + b"\n" + (slot.tail(control) or b"")
    dist.send(torch.tensor([len(facts), control["data_size"]]), owner)
    send_bytes(torch.frombuffer(bytearray(facts), dtype=torch.uint8), owner)
    send_bytes(slot.memory(control["data_size"]), owner)
    slot.close()


def _receive(tier: MemoryTier, best: Snapshots, source: int) -> Slot:
    """This rank's snapshot from another node, as a file of this one.

    Raises:
        ValueError: The holder has it no more, or it arrived damaged.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, source)
    length, size = (int(one) for one in sizes)
    if not length:
        raise ValueError(f"its copy with rank {source} is not whole")
    facts = torch.zeros(length, dtype=torch.uint8)
    receive_bytes(facts, source)
    text, _, tail = facts.numpy().tobytes().partition(b"\n")
    about = {**json.loads(text), "keeper": keeper()}
    name = SlotName(tier.life.run, tier.life.life, best.attempt, tier.seat.rank, "own", _ARRIVED)
    slot, failure = None, ""
    try:
        slot = Slot.create(tier.directory, name)
        data = slot.memory(size)
    except OSError as error:
        failure = f"there is no room for it: {error}"
        data = torch.empty(size, dtype=torch.uint8)  # the holder sends it in any case
    receive_bytes(data, source)
    if slot is None or failure or checksum(data) != about["data_crc"]:
        if slot is not None:
            slot.close(delete=True)
        raise ValueError(failure or "it arrived damaged")
    slot.begin(name, about)
    slot.seal(best.step, about, size, tail)
    return slot
