"""Starting where the newest usable snapshot or checkpoint ends. All ranks load the same one, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raypp.checkpoint.commit import list_checkpoints
from raypp.checkpoint.load import load_checkpoint
from raypp.data.loader import Loader
from raypp.errors import CheckpointError, Problem
from raypp.hf.initial_weights import load_from_hf
from raypp.memory.restore import load_from_memory
from raypp.memory.tier import MemoryTier
from raypp.records import Event, Reporter, Seat
from raypp.spec.job import Job
from raypp.storage import ObjectStore
from raypp.train.build import draw_weights
from raypp.train.recent_reports import RecentReports


@dataclass(frozen=True)
class Restorable:
    """What of a rank a checkpoint brings back, where from, and who hears of it.

    Attributes:
        store: Opened at the job's checkpoint.url.
        job: The job.
        stages: This rank's; their weights need not have values yet.
        optimizer: Over their parameters.
        loader: Takes up the data position.
        seat: This rank's.
        reporter: Where events go.
        recent: Takes up the newest reports.
    """

    store: ObjectStore
    job: Job
    stages: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    loader: Loader
    seat: Seat
    reporter: Reporter
    recent: RecentReports

    def tell(self, kind: str, message: str, step: int, **more: Any) -> None:
        self.reporter.event(Event(kind, message, attempt=self.seat.attempt, step=step, **more))


def restore_newest(mine: Restorable, tier: MemoryTier | None = None) -> int:
    """Loads weights, optimizer state, data position and recent reports. Collective over the world.

    From memory when all ranks have a snapshot of a step that is newer than the newest commit, else from the store.
    There rank 0 says which checkpoint; when any rank finds a part of it missing or corrupt, all go on to the next
    older. A run that has checkpoints never starts from nothing, nor from `model.from_hf` again. Every weight gets its
    value here, whatever it was.

    Returns:
        The step that was loaded; 0 when the run begins.

    Raises:
        CheckpointError: There are checkpoints, and none can be used.
        UnreachableError: The store does not answer; not a reason to fall back.
    """
    seat = mine.seat
    candidates = [c.step for c in list_checkpoints(mine.store, mine.job.name)] if seat.rank == 0 else []
    if tier is None:
        return _from_store(mine, candidates)
    started = time.monotonic()
    newest = _from_rank_zero(candidates[-1] if candidates else -1)
    found = load_from_memory(tier, newest, mine.stages, mine.optimizer)
    step = found.step
    if step:
        _take_up(mine, found.extra, step)
    else:
        step = _from_store(mine, candidates)
    if seat.rank == 0 and step:
        seconds = round(time.monotonic() - started, 4)
        source = "memory" if found.step else "store"
        details = {"source": source, "seconds": seconds, "committed": newest, "from_partner": found.from_partner}
        mine.tell("restored", found.in_words(step, newest), step, details=details)
    tier.start(found.nodes, found.addresses, step, found.slot, mine.optimizer, newest)
    return step


def _from_store(mine: Restorable, candidates: list[int]) -> int:
    """The newest checkpoint that every rank can use; `candidates` are rank 0's, oldest first."""
    rejected: list[Problem] = []
    while True:
        step = _from_rank_zero(candidates.pop() if candidates else -1)
        if step < 0:
            if rejected:
                raise CheckpointError(rejected)
            _begin(mine)
            return 0
        loaded = None
        try:
            loaded = load_checkpoint(mine.store, mine.job.name, step, list(mine.stages), mine.optimizer)
        except CheckpointError as error:
            rejected.extend(error.problems)
            message = f"step {step} cannot be used: {error}"
            mine.tell("checkpoint_rejected", message, step, rank=mine.seat.rank, node=mine.seat.node)
        if not _everyone(loaded is not None):
            if loaded is not None:
                rejected.append(Problem(f"step-{step:08d}", "another rank could not use its part"))
            continue
        assert loaded is not None
        _take_up(mine, loaded.extra, step)
        return step


def _take_up(mine: Restorable, extra: dict[str, Any], step: int) -> None:
    """What was kept beside the tensors: where the data go on, and the newest reports."""
    position = extra.get("data_position")
    if position is not None:
        mine.loader.seek(position)
    mine.recent.take_over(extra.get("recent_steps", ()))
    if mine.seat.rank == 0:
        mine.recent.tell_again(mine.reporter)
        mine.tell("resumed", f"from step {step}", step)


def _begin(mine: Restorable) -> None:
    """A run's first weights: those of `model.from_hf`, or drawn."""
    url = mine.job.model.from_hf
    if url is None:
        draw_weights(mine.stages, mine.job)
        return
    loaded = load_from_hf(url, mine.stages)
    if mine.seat.rank == 0:
        megabytes = round(loaded.bytes_read / 1e6, 1)
        what = f"{url}: {loaded.tensors} tensors, {megabytes} MB on this rank, {loaded.seconds:.1f} s"
        mine.tell("loaded_from_hf", what, 0)


def _from_rank_zero(value: int) -> int:
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _everyone(fine: bool) -> bool:
    tensor = torch.tensor([int(fine)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor)
