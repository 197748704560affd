"""Starting where the newest usable checkpoint ends. All ranks load the same one, or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from raypp.checkpoint.commit import list_checkpoints
from raypp.checkpoint.from_hf import load_from_hf
from raypp.checkpoint.load import load_checkpoint
from raypp.data.loader import Loader
from raypp.errors import CheckpointError, Problem
from raypp.records import Event, Reporter, Seat
from raypp.spec.job import Job
from raypp.storage import ObjectStore
from raypp.train.recent import RecentReports


def restore_newest(
    store: ObjectStore,
    job: Job,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    seat: Seat,
    reporter: Reporter,
    recent: RecentReports,
) -> int:
    """Loads weights, optimizer state, data position and recent reports. Collective over the world.

    Rank 0 says which checkpoint; when any rank finds a part of it missing or corrupt, all go on to the next older.
    A run that has checkpoints never starts from nothing, nor from `model.from_hf` again.

    Returns:
        The step that was loaded; 0 when the run begins.

    Raises:
        CheckpointError: There are checkpoints, and none can be used.
        UnreachableError: The store does not answer; not a reason to fall back.
    """
    candidates = [c.step for c in list_checkpoints(store, job.name)] if seat.rank == 0 else []
    rejected: list[Problem] = []
    while True:
        step = _from_rank_zero(candidates.pop() if candidates else -1)
        if step < 0:
            if rejected:
                raise CheckpointError(rejected)
            _begin(job, stages, seat, reporter)
            return 0
        loaded = None
        try:
            loaded = load_checkpoint(store, job.name, step, list(stages), optimizer)
        except CheckpointError as error:
            rejected.extend(error.problems)
            message = f"step {step} cannot be used: {error}"
            reporter.event(
                Event("checkpoint_rejected", message, attempt=seat.attempt, step=step, rank=seat.rank, node=seat.node)
            )
        if not _everyone(loaded is not None):
            if loaded is not None:
                rejected.append(Problem(f"step-{step:08d}", "another rank could not use its part"))
            continue
        assert loaded is not None
        if loaded.data_position is not None:
            loader.seek(loaded.data_position)
        recent.take_over(loaded.extra.get("recent_steps", ()))
        if seat.rank == 0:
            recent.tell_again(reporter)
            reporter.event(Event("resumed", f"from step {step}", attempt=seat.attempt, step=step))
        return step


def _begin(job: Job, stages: Sequence[nn.Module], seat: Seat, reporter: Reporter) -> None:
    """A run's first weights, when they are not drawn: those of `model.from_hf`."""
    if job.model.from_hf is None:
        return
    loaded = load_from_hf(job.model.from_hf, stages)
    if seat.rank == 0:
        megabytes = round(loaded.bytes_read / 1e6, 1)
        what = f"{job.model.from_hf}: {loaded.tensors} tensors, {megabytes} MB on this rank, {loaded.seconds:.1f} s"
        reporter.event(Event("loaded_from_hf", what, attempt=seat.attempt, step=0))


def _from_rank_zero(value: int) -> int:
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _everyone(fine: bool) -> bool:
    tensor = torch.tensor([int(fine)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor)
