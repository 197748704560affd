"""Whether a job fits into the memory of its devices, and which changes make it fit.

By the planned memory, so an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raypp.errors import JobError, Problem
from raypp.planning.check import check_plan
from raypp.planning.plan import make_plan
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job

CERTAIN = 0.9
"""A job is refused only if this share of its planned memory is more than a device has."""
_GIB, _MIB = 1 << 30, 1 << 20
_MOST = 4


@dataclass(frozen=True)
class Change:
    """A change of a job.

    Attributes:
        settings: `key=value`, ready for `--set`.
        ranks: Number of ranks after the change.
        bytes: Planned memory of its largest rank.
    """

    settings: tuple[str, ...]
    ranks: int
    bytes: int

    def words(self, ranks_now: int) -> str:
        more = f" on {self.ranks} devices" if self.ranks != ranks_now else ""
        return f"--set {' --set '.join(self.settings)}{more} ({size_text(self.bytes)})"


def size_text(size: float) -> str:
    """Returns a number of bytes as text, in GiB or MiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def memory_problems(job: Job, capacity: int) -> list[Problem]:
    """Returns a problem if ranks need more memory than a device has, with changes that make it fit.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of the smallest device that a rank may get.
    """
    plan = make_plan(job)
    needs = [memory.total for memory in plan.memory]
    if CERTAIN * max(needs) <= capacity:
        return []
    large = [f"pp{rank} {size_text(need)}" for rank, need in enumerate(needs) if CERTAIN * need > capacity]
    listed = ", ".join(large[:8]) + (f" and {len(large) - 8} more" if len(large) > 8 else "")
    what = f"a device has {size_text(capacity)}; ranks are planned to need more: {listed}"
    return [Problem("train", what, changes_in_words(job, capacity))]


def changes_in_words(job: Job, capacity: int, factor: float = 1.0) -> str:
    """Returns the changes of `changes_that_fit` as one sentence."""
    found = changes_that_fit(job, capacity, factor)
    if not found:
        what = f"no single change fits into {size_text(capacity)} by plan"
        return f"{what}: use more devices, or a smaller model or sequence"
    return f"fits by plan: {'; or '.join(change.words(job.mesh.world) for change in found)}"


def changes_that_fit(job: Job, capacity: int, factor: float = 1.0) -> list[Change]:
    """Returns changes that make every rank fit into `capacity` bytes, those of fewest ranks first.

    None of them changes how many rows a step takes.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of a device.
        factor: What a rank was measured to need, relative to its plan.
    """
    found: list[Change] = []
    fitting: list[set[str]] = []
    for changes in _changes(job):
        changed = None if any(keys <= changes.keys() for keys in fitting) else _changed(job, changes)
        if changed is None:  # or changing fewer keys, or the same ones less, is enough
            continue
        need = int(factor * max(memory.total for memory in make_plan(changed).memory))
        if need <= capacity:
            fitting.append(set(changes))
            found.append(Change(_settings(changes), changed.mesh.world, need))
    return sorted(found, key=lambda change: (change.ranks, len(change.settings)))[:_MOST]


def _changes(job: Job) -> Iterator[dict[str, Any]]:
    train, mesh, microbatches = job.train, job.mesh, job.pipeline.microbatches
    recompute = "train.activation_checkpointing"
    stronger = {"none": ["selective", "full"], "selective": ["full"], "full": []}[train.activation_checkpointing]
    smaller = [
        {"train.micro_batch_size": train.micro_batch_size // by, "pipeline.microbatches": microbatches * by}
        for by in (2, 4, 8, 16)
        if train.micro_batch_size % by == 0
    ]
    more = [
        {"mesh.fsdp": mesh.fsdp * by, "pipeline.microbatches": microbatches // by}
        for by in (2, 4, 8)
        if microbatches % by == 0
    ] + [{"mesh.pp": mesh.pp * by} for by in (2, 4)]
    if mesh.cp > 1 or job.data.seq_len >= 8192:
        more += [{"mesh.cp": mesh.cp * by} for by in (2, 4)]
    yield from ({recompute: value} for value in stronger)
    yield from smaller
    yield from ({recompute: value} | change for change in smaller for value in stronger)
    if not mesh.reshard_after_forward:
        yield {"mesh.reshard_after_forward": True}
    yield from more
    yield from ({recompute: value} | change for change in more for value in stronger[-1:])


def _settings(changes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items())


def _changed(job: Job, changes: Mapping[str, Any]) -> Job | None:
    """Returns the changed job; None if it cannot run."""
    document = job_document(job)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        document[section][name] = value
    try:
        changed = parse_job(document)
    except JobError:
        return None
    return None if check_plan(changed) else changed
