"""Restores an attempt from snapshots in memory.

Every rank lists the files of its node. One exchange gives all ranks the same list, so that all
choose the same step. If a snapshot turns out to be missing or damaged, they leave it out and choose
again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypp.checkpoint.commit import job_identity
from raypp.checkpoint.dtypes import DTYPES
from raypp.checkpoint.layout import attempt_key
from raypp.checkpoint.load_checkpoint import fill_optimizer
from raypp.checkpoint.state import (
    OPTIMIZER,
    RESIDUAL,
    Slice,
    model_slices,
    optimizer_slices,
    residual_slices,
)
from raypp.checkpoint.tensor_file import TensorEntry
from raypp.memory.fetch import choose, fetch_snapshot, from_rank_zero, gather_json, snapshots_here
from raypp.memory.rank_slots import RunLife
from raypp.memory.slot import Slot, decode_tail
from raypp.memory.tier import MemoryTier
from raypp.records import Reporter, Seat
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.storage import NotFound, ObjectStore
from raypp.storage.rate_limit import Pace

_TRIES = 8


@dataclass
class FoundInMemory:
    """The result of looking for snapshots in memory.

    Attributes:
        nodes: The node of every rank.
        addresses: The address at which every rank receives copies.
        step: The step that was restored; 0 if none was.
        reason: Why this step or why none was restored; may be empty.
        slot: This rank's snapshot of that step, open.
        extra: The JSON that the trainer stored with it; rank 0's also contains the recent reports.
        from_partner: Ranks whose snapshot came from another node.
    """

    nodes: list[int]
    addresses: list[tuple[str, int] | None]
    step: int = 0
    reason: str = ""
    slot: Slot | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    from_partner: list[int] = field(default_factory=list)

    def in_words(self, step: int, newest_commit: int) -> str:
        """Returns the message of the event that reports where the attempt starts from."""
        if not self.step:
            return f"from the store: step {step}; {self.reason}"
        through = ""
        if self.from_partner:
            ranks = "rank" if len(self.from_partner) == 1 else "ranks"
            through = f" ({ranks} {', '.join(map(str, self.from_partner))} from the copy on another node)"
        commit = f"newest commit is step {newest_commit}" if newest_commit >= 0 else "nothing is committed"
        refused = f"; {self.reason}" if self.reason else ""
        return f"from memory: step {step} on all {len(self.nodes)} ranks{through}; {commit}{refused}"


def open_memory_tier(
    job: Job, seat: Seat, store: ObjectStore, reporter: Reporter, pace: Pace | None = None
) -> MemoryTier | None:
    """Creates this rank's memory tier, not yet started; None if the job has none.

    Collective over the world.

    Args:
        pace: The rate limit that this rank's uploads and copies share.
    """
    if not job.checkpoint.memory_tier:
        return None
    # Without a controller, the ranks have no other channel than their process group.
    drawn = "" if seat.secret else secrets.token_hex(32)
    life, secret = from_rank_zero([_life(store, job), drawn] if seat.rank == 0 else None)
    identity = json.dumps(job_identity(job_document(job)), sort_keys=True)
    same_job = hashlib.sha256(identity.encode()).hexdigest()[:16]
    about = RunLife(job.name, life, same_job, bytes.fromhex(seat.secret or secret))
    return MemoryTier(about, seat, job.checkpoint.memory_every_steps, reporter, pace)


def load_from_memory(
    tier: MemoryTier, newest_commit: int, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> FoundInMemory:
    """Restores the newest step of which every rank's snapshot exists, if no commit is as new.

    Collective over the world. Replaces the weights and optimizer state of every rank or of none.

    Args:
        tier: This rank's memory tier.
        newest_commit: Step of the newest commit, the same on every rank; 0 if there is none.
        stages: This rank's stages.
        optimizer: The optimizer over their parameters.
    """
    seat, address = tier.seat, tier.listen()
    damaged: set[Path] = set()
    result: FoundInMemory | None = None
    reasons: list[str] = []
    for _ in range(_TRIES):
        here = snapshots_here(tier, damaged)
        seen = [[name.attempt, name.step, name.rank, about["committed"]] for name, _, about in here]
        said = gather_json({"node": seat.node_rank, "address": address, "seen": seen})
        if result is None:
            where = [None if one["address"] is None else tuple(one["address"]) for one in said]
            result = FoundInMemory([one["node"] for one in said], where)
        best, why = choose([one["seen"] for one in said], newest_commit)
        if best is None:
            result.reason = "; ".join([*reasons, why])
            return result
        slot, failure, prepared = None, "", None
        try:
            slot = fetch_snapshot(tier, best, here, damaged)
            prepared = _prepare(slot, stages, optimizer, damaged)
        except (OSError, ValueError) as error:
            failure = str(error)
        failures = {rank: text for rank, text in enumerate(gather_json(failure)) if text}
        if not failures and prepared is not None:
            prepared.apply()
            result.step, result.slot, result.extra = best.step, slot, prepared.extra
            result.reason = "; ".join(reasons)
            result.from_partner = [rank for rank in range(seat.world_size) if best.source(rank) != rank]
            return result
        if slot is not None:
            slot.close(delete=slot.path in damaged)
        reasons += [
            f"rank {rank}'s snapshot of step {best.step} cannot be used: {text}" for rank, text in failures.items()
        ]
    assert result is not None
    result.reason = "; ".join(reasons)
    return result


def _life(store: ObjectStore, job: Job) -> str:
    """Returns 12 hex digits for the run's location and first attempt.

    They differ for another store, and for a run that was started over.
    """
    try:
        first = store.get(attempt_key(job.name, 1))
    except NotFound:
        first = b""
    return hashlib.sha256(b"\0".join((job.run_url.encode(), first))).hexdigest()[:12]


def _prepare(
    slot: Slot, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, damaged: set[Path]
) -> PreparedLoad:
    control = slot.control()
    try:
        if control is None:
            raise ValueError("it is incomplete")
        return PreparedLoad(slot, control, stages, optimizer)
    except ValueError:
        damaged.add(slot.path)
        raise


class PreparedLoad:
    """A verified snapshot that fits this rank's stages; `apply` restores it.

    The constructor performs all checks, before anything is changed.

    Args:
        slot: Verified (`Slot.verify`); must stay open until `apply` returns.
        control: Its control block.
        stages: This rank's stages.
        optimizer: The optimizer over their parameters.

    Raises:
        ValueError: The snapshot does not fit these stages; the message names the tensor.
    """

    def __init__(
        self, slot: Slot, control: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        tail = slot.tail(control)
        if tail is None:
            raise ValueError("its tail is corrupt")
        entries, self.extra = decode_tail(tail, control["data_size"])
        self._stages, self._optimizer = stages, optimizer
        self._data = slot.memory(control["data_size"])
        by_name = {entry.name: entry for entry in entries}
        saved = {name: (e.global_shape, DTYPES[e.dtype]) for name, e in by_name.items() if name.startswith(OPTIMIZER)}
        targets = model_slices(stages)
        more, self._entries = optimizer_slices(stages, optimizer, saved)
        targets.update(more)
        residuals = residual_slices(stages, saved)
        if residuals.cleared or (not residuals.targets and any(f"/{RESIDUAL}" in name for name in saved)):
            raise ValueError("gradients were summed over replicas in another way (train.sync)")
        targets.update(residuals.targets)
        self._python = {name: entry.python for name, entry in by_name.items() if entry.python}
        self._pairs: list[tuple[Tensor, TensorEntry]] = []
        for name, slices in targets.items():
            for target in slices:
                if target.tensor.numel():
                    self._pairs.append((target.tensor, _matching(target, by_name.get(name))))

    @torch.no_grad()
    def apply(self) -> None:
        """Replaces weights and optimizer state."""
        for target, entry in self._pairs:
            target.copy_(self._data[entry.begin : entry.end].view(DTYPES[entry.dtype]).view(entry.shape))
        fill_optimizer(self._optimizer, self._stages, self._entries, self._python)


def _matching(target: Slice, entry: TensorEntry | None) -> TensorEntry:
    if entry is None:
        raise ValueError(f"it has no {target.name}")
    here = (tuple(target.tensor.shape), target.global_shape, target.offset)
    there = (entry.shape, entry.global_shape, entry.offset)
    if here != there:
        raise ValueError(f"{target.name} is sharded differently: {there}, here {here}")
    return entry
