"""Going on from snapshots in memory: which step all ranks still have, who has it, and how it comes back.

Every rank looks at the files of its node; one exchange of what each sees tells all ranks the same, so that all choose
alike. A snapshot that turns out to be gone or damaged is left out, and they choose again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raypp.checkpoint.commit import job_identity
from raypp.checkpoint.layout import attempt_key
from raypp.checkpoint.memory_files import SlotName, keeper, peek
from raypp.checkpoint.memory_load import PreparedLoad
from raypp.checkpoint.memory_slot import Slot, checksum
from raypp.checkpoint.memory_tier import MemoryTier, RunLife
from raypp.records import Reporter, Seat
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.storage import NotFound, ObjectStore
from raypp.train.exchange import from_rank_zero, gather_json, receive_bytes, send_bytes

_TRIES = 8
_ARRIVED = 9
"""Number, in its name, of a snapshot that came from another node."""


@dataclass(frozen=True)
class Snapshots:
    """One step of one attempt that could be gone on from.

    Attributes:
        step: Optimizer steps done.
        attempt: Who took them.
        holders: By rank: the ranks on whose node its snapshot lies.
        committed: The newest commit that was known when they were taken.
    """

    step: int
    attempt: int
    holders: dict[int, list[int]]
    committed: int

    def source(self, owner: int) -> int:
        """Who gives a rank its snapshot: itself, when it lies on its node."""
        return owner if owner in self.holders[owner] else min(self.holders[owner])


@dataclass
class FoundInMemory:
    """What came of looking.

    Attributes:
        step: That was loaded; 0: none.
        told: In words, why that one or why none.
        slot: This rank's snapshot of that step, open.
        extra: What the trainer had given with it; of rank 0 also the recent reports.
        nodes: The node of every rank.
        addresses: Where every rank takes copies.
        from_partner: Ranks whose snapshot came from another node.
    """

    nodes: list[int]
    addresses: list[tuple[str, int] | None]
    step: int = 0
    told: str = ""
    slot: Slot | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    from_partner: list[int] = field(default_factory=list)

    def in_words(self, step: int, newest_commit: int) -> str:
        """For the event."""
        if not self.step:
            return f"from the store: step {step}; {self.told}"
        through = ""
        if self.from_partner:
            ranks = "rank" if len(self.from_partner) == 1 else "ranks"
            through = f" ({ranks} {', '.join(map(str, self.from_partner))} from the copy on another node)"
        commit = f"newest commit is step {newest_commit}" if newest_commit >= 0 else "nothing is committed"
        refused = f"; {self.told}" if self.told else ""
        return f"from memory: step {step} on all {len(self.nodes)} ranks{through}; {commit}{refused}"


def open_memory_tier(job: Job, seat: Seat, store: ObjectStore, reporter: Reporter) -> MemoryTier | None:
    """The memory tier of this rank, not yet started; None when the job does without. Collective over the world."""
    if not job.checkpoint.memory_tier:
        return None
    facts = [_life(store, job), secrets.token_hex(32)] if seat.rank == 0 else None
    life, secret = from_rank_zero(facts)
    identity = json.dumps(job_identity(job_document(job)), sort_keys=True)
    about = RunLife(job.name, life, hashlib.sha256(identity.encode()).hexdigest()[:16], bytes.fromhex(secret))
    return MemoryTier(about, seat, job.checkpoint.memory_every_steps, reporter)


def load_from_memory(
    tier: MemoryTier, newest_commit: int, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> FoundInMemory:
    """Loads the newest step of which every rank's snapshot is there, when it is newer than the newest commit.

    Collective over the world. Either every rank's weights and optimizer state are replaced, or none's.

    Args:
        tier: This rank's.
        newest_commit: Its step; the same on every rank. 0: there is none.
    """
    seat, address = tier.seat, tier.listen()
    damaged: set[Path] = set()
    result: FoundInMemory | None = None
    reasons: list[str] = []
    for _ in range(_TRIES):
        here = _here(tier, damaged)
        seen = [[name.attempt, name.step, name.rank, about["committed"]] for name, _, about in here]
        said = gather_json({"node": seat.node_rank, "address": address, "seen": seen})
        if result is None:
            where = [None if one["address"] is None else tuple(one["address"]) for one in said]
            result = FoundInMemory([one["node"] for one in said], where)
        best, why = choose([one["seen"] for one in said], newest_commit)
        if best is None:
            result.told = "; ".join([*reasons, why])
            return result
        slot, failure, prepared = None, "", None
        try:
            slot = _fetch(tier, best, here, damaged)
            prepared = _prepare(slot, stages, optimizer, damaged)
        except (OSError, ValueError) as error:
            failure = str(error)
        failures = {rank: text for rank, text in enumerate(gather_json(failure)) if text}
        if not failures and prepared is not None:
            prepared.apply()
            result.step, result.slot, result.extra = best.step, slot, prepared.extra
            result.told = "; ".join(reasons)
            result.from_partner = [rank for rank in range(seat.world_size) if best.source(rank) != rank]
            return result
        if slot is not None:
            slot.close(delete=slot.path in damaged)
        reasons += [
            f"rank {rank}'s snapshot of step {best.step} cannot be used: {text}" for rank, text in failures.items()
        ]
    assert result is not None
    result.told = "; ".join(reasons)
    return result


def choose(seen: Sequence[Sequence[Sequence[int]]], newest_commit: int) -> tuple[Snapshots | None, str]:
    """The snapshots to go on from, and in words why there are none.

    Args:
        seen: By rank: attempt, step, rank whose state it is, newest commit known then, of every snapshot it sees.
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
        why = f"step {gone_back[0].committed} was committed and is gone: snapshots taken after it are not used"
        return None, why
    newer = [one for one in newer if one.committed <= newest_commit]
    whole = next((one for one in newer if all(rank in one.holders for rank in range(len(seen)))), None)
    if whole is not None:
        return whole, ""
    missing = [rank for rank in range(len(seen)) if rank not in newer[0].holders]
    ranks = f"rank {missing[0]}'s snapshot" if len(missing) == 1 else f"the snapshots of ranks {missing}"
    return None, f"{ranks} of step {newer[0].step} {'is' if len(missing) == 1 else 'are'} in no memory"


def _life(store: ObjectStore, job: Job) -> str:
    """Where the run lives and when it began, as 12 hex digits: another store, or a run begun anew, has others."""
    try:
        first = store.get(attempt_key(job.name, 1))
    except NotFound:
        first = b""
    return hashlib.sha256(b"\0".join((job.run_url.encode(), first))).hexdigest()[:12]


def _here(tier: MemoryTier, damaged: set[Path]) -> list[tuple[SlotName, Path, dict[str, Any]]]:
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


def _fetch(
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


def _prepare(
    slot: Slot, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, damaged: set[Path]
) -> PreparedLoad:
    control = slot.control()
    try:
        if control is None:
            raise ValueError("it is not whole")
        return PreparedLoad(slot, control, stages, optimizer)
    except ValueError:
        damaged.add(slot.path)
        raise
