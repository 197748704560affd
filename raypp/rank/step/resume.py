"""Restores the newest usable snapshot or checkpoint. All ranks load the same one, or none."""

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from raypp.errors import CheckpointError, JobError, Problem
from raypp.job.lora import also_trained
from raypp.rank.assemble import AssembledRank
from raypp.rank.build import draw_weights, keep_frozen
from raypp.rank.step.reports import RecentReports
from raypp.records import Event, EventKind, Reporter, Seat
from raypp.state.checkpoint.commit import list_checkpoints, read_commit, read_extra
from raypp.state.checkpoint.layout import commit_key, spec_key, split_location
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.memory.restore import load_from_memory
from raypp.state.memory.tier import MemoryTier
from raypp.storage import ObjectStore, open_store


@dataclass(frozen=True)
class Restorable:
    """A rank that a checkpoint restores, its source, and its reporter. `store`: opened at the job's
    checkpoint.url. `rank`: the rank; the weights of its stages may be uninitialised."""

    store: ObjectStore
    rank: AssembledRank
    reporter: Reporter
    recent: RecentReports

    def progress(self, done: int, total: int) -> None:
        """Marks that loading goes on; a hang is a long time without a mark."""
        self.reporter.phase("load", f"{100 * done // max(1, total)} %")

    def tell(self, kind: EventKind, message: str, step: int, **more: Any) -> None:
        """Reports an event of this attempt."""
        self.reporter.event(Event(kind, message, attempt=self.rank.seat.attempt, step=step, **more))


def check_shared(store: ObjectStore, run: str, seat: Seat) -> None:
    """Checks that ranks on several nodes use one store. Collective over the world. In a directory
    that they do not share, a checkpoint would lie in parts on different machines, and could not be
    loaded again. Raises JobError: this rank does not find the run that others find."""
    if seat.local_world_size == seat.world_size:
        return
    held = store.head(spec_key(run)) is not None
    if _everyone(held) or _everyone(not held) or held:
        return
    what = f"{store.url} on node {seat.node} does not hold the run {run!r}, which other nodes find there"
    fix = "use s3://…, or a directory that all nodes share; `raypp doctor JOB` checks it"
    raise JobError(Problem("checkpoint.url", what, fix))


def restore_newest(mine: Restorable, tier: MemoryTier | None = None) -> tuple[int, bool]:
    """Restores weights, optimizer, data position and recent reports. Collective over the world.

    Frozen weights are not part of a run's state: every attempt loads them from `model.from_hf`, or
    draws them, or has them from the last one in this process. The rest comes from memory if all
    ranks have a snapshot of one step that is newer than the newest commit; else from the store.
    Where replicas train apart, each has a step of its own in memory, since the same outer step. In
    the store rank 0 chooses the checkpoint; if a rank finds its part missing or corrupt, all ranks
    fall back to the next older one. A run with checkpoints never starts from initial weights, nor
    takes trained weights from `model.from_hf` again. Every weight is set here, so it may be
    uninitialised before.

    Returns:
        The restored step, 0 for a new run; and whether all replicas begin after the same step, at
        which their weights agree.

    Raises:
        CheckpointError: There are checkpoints, but none can be used.
        UnreachableError: The store does not answer. This is no reason to use an older checkpoint.
        JobError: `model.from_hf` names another base than the one the adapters belong to.
    """
    seat = mine.rank.seat
    _set_frozen(mine)
    candidates = [c.step for c in list_checkpoints(mine.store, mine.rank.job.name)] if seat.rank == 0 else []
    if tier is None:
        return _from_store(mine, candidates), True
    started = time.monotonic()
    newest = _from_rank_zero(candidates[-1] if candidates else -1)
    restored = load_from_memory(tier, newest, mine.rank.built.modules, mine.rank.optimizer)
    step = restored.step
    if step:
        _take_up(mine, restored.extra, step, restored.remark, restored.origins)
    else:
        step = _from_store(mine, candidates)
    if seat.rank == 0 and step:
        seconds = round(time.monotonic() - started, 4)
        source = "memory" if restored.step else "store"
        details = {"source": source, "seconds": seconds, "committed": newest, "from_partner": restored.from_partner}
        mine.tell("restored", restored.in_words(step, newest), step, details=details)
    best = restored.best
    kept = None if best is None else (best.attempt, {owner: best.step_of(owner) for owner in best.holders})
    tier.start(restored.nodes, restored.addresses, step, restored.slot, mine.rank.optimizer, newest, kept)
    return step, best is None or (mine.rank.job.savable(step) and len(restored.steps) == 1)


def _from_store(mine: Restorable, candidates: list[int]) -> int:
    """Loads the newest checkpoint every rank can use; `candidates` are rank 0's, oldest first."""
    rank, run = mine.rank, mine.rank.job.name
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
            checkpoint = load_checkpoint(mine.store, run, step, rank.built.modules, rank.optimizer, mine.progress)
            if checkpoint is not None:
                read_extra(checkpoint.extra, commit_key(run, step))
            loaded = checkpoint
        except CheckpointError as error:
            rejected.extend(error.problems)
            message = f"step {step} cannot be used: {error}"
            mine.tell("checkpoint_rejected", message, step, rank=rank.seat.rank, node=rank.seat.node)
        if not _everyone(loaded is not None):
            if loaded is not None:
                rejected.append(Problem(f"step-{step:08d}", "another rank could not use its part"))
            continue
        assert loaded is not None
        _take_up(mine, loaded.extra, step, loaded.remark)
        if rank.seat.rank == 0:
            from raypp.state.checkpoint.compatibility import rate_jump  # no other rank compares

            before = read_commit(mine.store, run, step).job
            if jump := rate_jump(before, rank.job, step):
                mine.tell("learning_rate", jump, step)
        return step


def _take_up(mine: Restorable, extra: dict[str, Any], step: int, remark: str, origins: Sequence[int] = ()) -> None:
    """Restores what is saved with the tensors: the data position and the recent reports."""
    known = read_extra(extra, f"step {step}")
    if known.data_position is not None:
        mine.rank.loader.seek(asdict(known.data_position))
    mine.recent.restore(known.recent_steps, known.own_steps)
    mine.recent.losses, mine.recent.loss_scale = known.losses, known.loss_scale
    if mine.rank.outer is not None:
        mine.rank.outer.begin(known.outer_tokens, origins)
    if mine.rank.seat.rank == 0:
        mine.recent.report_again(mine.reporter)
        mine.tell("resumed", f"from step {step}", step)
        if remark:
            mine.tell("sync", remark, step)


def _set_frozen(mine: Restorable) -> None:
    """Sets the frozen weights: those of `model.from_hf`, or initial values."""
    model = mine.rank.job.model
    if all(weight.requires_grad for stage in mine.rank.built.modules for weight in stage.parameters()):
        return
    if model.from_hf is None:
        draw_weights(mine.rank.built.modules, mine.rank.job, frozen=True, skip=mine.rank.kept, progress=mine.progress)
    else:
        _load_from_hf(mine, model.from_hf, frozen=True)
    keep_frozen(mine.rank.frozen, mine.rank.built.modules)


def _begin(mine: Restorable) -> None:
    """Sets a new run's trained weights: of `model.from_hf`, `model.from_run`, or drawn ones."""
    model = mine.rank.job.model
    read = also_trained(model) if model.from_hf is not None else {}
    if model.from_run is not None:
        _load_from_run(mine, model.from_run)
    elif model.from_hf is None or model.lora is not None:
        draw_weights(mine.rank.built.modules, mine.rank.job, frozen=False, skip=read, progress=mine.progress)
    if model.from_hf is not None and (model.lora is None or read):
        _load_from_hf(mine, model.from_hf, frozen=False)
    if mine.rank.outer is not None:
        mine.rank.outer.begin()


def _load_from_run(mine: Restorable, location: str) -> None:
    url, run, step = split_location(location)
    assert url is not None
    store = open_store(url)
    if step is None:
        committed = list_checkpoints(store, run) if mine.rank.seat.rank == 0 else []
        step = _from_rank_zero(committed[-1].step if committed else -1)
    if step < 0:
        raise CheckpointError(Problem("model.from_run", f"{run} has no checkpoint", "submit this run when it has one"))
    loaded = load_checkpoint(store, run, step, mine.rank.built.modules, None, mine.progress)
    if mine.rank.seat.rank == 0 and loaded is not None:
        megabytes = round(loaded.bytes_read / 1e6, 1)
        mine.tell("loaded_from_run", f"{location}: weights of step {step}, {megabytes} MB on this rank", 0)


def _load_from_hf(mine: Restorable, url: str, *, frozen: bool) -> None:
    # Only runs with model.from_hf import these.
    from raypp.state.hf.initial_weights import load_from_hf
    from raypp.state.hf.model_files import HfFiles, with_base_id
    from raypp.state.hf.unused_tensors import unused_weights

    rank = mine.rank
    if frozen and rank.seat.rank == 0:
        with_base_id(rank.job.model, HfFiles(url))
    skip: Collection[str] = rank.kept if frozen else ()
    if not frozen and rank.job.model.lora is not None:  # adapters are drawn
        names = {name for stage in rank.built.modules for name, _ in stage.named_parameters()}
        skip = names - also_trained(rank.job.model).keys()
    loaded = load_from_hf(url, rank.built.modules, frozen=frozen, skip=skip, progress=mine.progress)
    if rank.seat.rank == 0:
        megabytes = round(loaded.bytes_read / 1e6, 1)
        what = f"{url}: {loaded.tensors} tensors, {megabytes} MB on this rank, {loaded.seconds:.1f} s"
        if frozen and skip:
            what = f"{url}: this rank has kept {len(skip)} tensors of it since the last attempt"
        unused = "" if skip else unused_weights(HfFiles(url), rank.job.model)
        mine.tell("loaded_from_hf", "; ".join(filter(None, (what, unused))), 0)


def _from_rank_zero(value: int) -> int:
    """Returns rank 0's value. Collective over the world."""
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _everyone(fine: bool) -> bool:
    """Whether `fine` holds on all ranks. Collective over the world."""
    tensor = torch.tensor([int(fine)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor)
