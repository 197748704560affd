"""What the keys of a recipe come to: a plan's remarks on rate and data."""

from __future__ import annotations

from collections.abc import Iterator

from raypp.errors import first_of
from raypp.job.job import Job
from raypp.job.optimizer_groups import matched, trained_names

_NAMES = 6


def recipe_remarks(job: Job) -> Iterator[str]:
    """Yields what follows from keys that count in shares, or change something on the way."""
    schedule, train = job.train.lr_schedule, job.train
    first, length = train.decay
    if schedule.kind == "wsd" or schedule.decay_steps is not None or schedule.warmup_ratio is not None:
        falls = "" if schedule.kind == "constant" else f", falls in steps {first + 1:,} to {first + length:,}"
        yield f"train.lr_schedule: the rate rises in {train.warmup_steps:,} steps{falls}"
    if train.global_batch is not None:
        each = (
            f"{job.mesh.replicas} replicas × {train.micro_batch_size} rows × {job.pipeline.microbatches} microbatches"
        )
        yield f"train.global_batch: {job.rows_per_step:,} rows, {each}"
    if job.checkpoint.best is not None:
        most = job.checkpoint.keep + job.checkpoint.best.keep
        yield f"checkpoint.best: up to {most} checkpoints are kept, and one more while it is saved"
    groups = train.optimizer.groups
    for index, (group, names) in enumerate(zip(groups, matched(trained_names(job.model), groups), strict=True)):
        decay = "" if group.weight_decay is None else f", weight_decay {group.weight_decay:g}"
        what = first_of(names, _NAMES) or "by the names of your own model"
        yield f"train.optimizer.groups[{index}]: lr × {group.lr_factor:g}{decay}: {what}"
    for phase in job.data.phases:
        weights = job.data.weights_at(phase.from_step)
        names = [part.name or f"parts[{index}]" for index, part in enumerate(job.data.parts or ())]
        shares = ", ".join(f"{name} {weight / sum(weights):.1%}" for name, weight in zip(names, weights, strict=True))
        yield f"data.phases: rows from step {phase.from_step:,} on: {shares}"
