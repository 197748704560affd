"""Whether a job fits into the memory of its devices, and which changes make it fit.

By the planned memory, so an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raypp.errors import JobError, Problem
from raypp.planning.activations import Kind
from raypp.planning.check import check_plan
from raypp.planning.choices import lookahead_of, schedule_of
from raypp.planning.memory import rank_memory
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.search import MOST_ACTIONS, changed_job
from raypp.spec.job import Job

CERTAIN = 0.9
"""A job is refused only if this share of its planned memory is more than a device has."""
_GIB, _MIB = 1 << 30, 1 << 20
_MOST_DEVICES = 64
"""Meshes with more than this many times the job's devices are not proposed."""


@dataclass(frozen=True)
class Fit:
    """Changes with which a job fits.

    Attributes:
        changes: Keys and values, ready for `--set`.
        peak: Bytes of the rank that then needs most.
        devices: Devices that it then needs.
    """

    changes: Mapping[str, Any]
    peak: int
    devices: int

    def settings(self) -> list[str]:
        """Returns `key=value` settings for `raypp submit --set`."""
        return [f"{key}={_text(value)}" for key, value in self.changes.items()]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def size_text(size: float) -> str:
    """Returns a number of bytes as text, in GiB or MiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def memory_of_ranks(job: Job, kind: Kind | None = None) -> list[int]:
    """Returns the bytes of every pipeline rank at its peak."""
    pipeline = resolve_pipeline(job)
    return [
        rank_memory(job, stages, pipeline.cut, pipeline.program[rank], kind).total
        for rank, stages in enumerate(pipeline.stages_of_rank)
    ]


def peak_memory(job: Job, kind: Kind | None = None) -> int:
    """Returns the bytes of the rank that needs most."""
    return max(memory_of_ranks(job, kind))


def memory_problems(job: Job, capacity: int) -> list[Problem]:
    """Returns a problem if ranks need more memory than a device has, with changes that make it fit.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of the smallest device that a rank may get.
    """
    needs = memory_of_ranks(job)
    if CERTAIN * max(needs) <= capacity:
        return []
    large = [f"pp{rank} {size_text(need)}" for rank, need in enumerate(needs) if CERTAIN * need > capacity]
    listed = ", ".join(large[:8]) + (f" and {len(large) - 8} more" if len(large) > 8 else "")
    what = f"a device has {size_text(capacity)}; ranks are planned to need more: {listed}"
    return [Problem("train", what, changes_in_words(job, capacity))]


def changes_in_words(job: Job, capacity: int, factor: float = 1.0) -> str:
    """Returns the changes of `changes_that_fit` as one sentence.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of a device.
        factor: What a rank was measured to need, relative to its plan.
    """
    found = changes_that_fit(job, int(capacity / factor))
    if not found:
        what = f"no change that was tried fits into {size_text(capacity)} by plan"
        return f"{what}: use more devices, or a smaller model or sequence"
    return f"fits by plan: {'; or '.join(_in_words(fit, job, factor) for fit in found)}"


def _in_words(fit: Fit, job: Job, factor: float) -> str:
    more = f" on {fit.devices} devices" if fit.devices != job.mesh.world else ""
    return f"--set {' --set '.join(fit.settings())}{more} ({size_text(factor * fit.peak)})"


def changes_that_fit(job: Job, device_memory: int, kind: Kind | None = None) -> list[Fit]:
    """Returns changes with which every rank fits into a device's memory; the global batch stays.

    Each proposal has been planned. Single changes come first; if none suffices, all that save
    memory on the same devices together; if they do not, these with a mesh of more devices.

    Args:
        job: A job in which `check_plan` finds no problem.
        device_memory: Bytes of a device.
        kind: The kind of device; None: the job's.
    """
    before = peak_memory(job, kind)
    if before <= device_memory:
        return []
    cheap = list(_cheap(job))
    planned = [_planned(job, changes, kind) for changes in (*cheap, *_meshes(job))]
    found = _first_of_each(fit for fit in planned if fit is not None and fit.peak <= device_memory)
    if found:
        return found
    together: dict[str, Any] = {}
    for changes in cheap:
        fit = _planned(job, {**together, **changes}, kind)
        if fit is not None and fit.peak < before:
            together, before = {**together, **changes}, fit.peak
            if fit.peak <= device_memory:
                return [fit]
    cheaper = changed_job(job, together) or job
    planned = [_planned(job, {**together, **changes}, kind) for changes in _meshes(cheaper)]
    found = _first_of_each(fit for fit in planned if fit is not None and fit.peak <= device_memory)
    return sorted(found, key=lambda fit: fit.devices)


def _first_of_each(fits: Iterable[Fit]) -> list[Fit]:
    """Returns the first proposal for each set of keys: the smallest change of these keys."""
    found: dict[frozenset[str], Fit] = {}
    for fit in fits:
        found.setdefault(frozenset(fit.changes), fit)
    return list(found.values())


def _planned(job: Job, changes: Mapping[str, Any], kind: Kind | None) -> Fit | None:
    one = changed_job(job, changes)
    if one is None or 2 * one.num_stages * one.pipeline.microbatches > MOST_ACTIONS or check_plan(one):
        return None
    try:
        return Fit(dict(changes), peak_memory(one, kind), one.mesh.world)
    except JobError:
        return None


def _cheap(job: Job) -> Iterator[dict[str, Any]]:
    """Yields single changes on the same devices, those that cost little time first."""
    mesh, pipeline, train = job.mesh, job.pipeline, job.train
    if lookahead_of(job):
        yield {"pipeline.lookahead": 0}
    if schedule_of(job) == "gpipe" and pipeline.microbatches >= mesh.pp:
        yield {"pipeline.schedule": "1f1b"}
    rows, factor = train.micro_batch_size, 2
    while rows % factor == 0:
        smaller = {"train.micro_batch_size": rows // factor}
        yield {**smaller, "pipeline.microbatches": pipeline.microbatches * factor}
        factor *= 2
    for extent in ("selective", "full"):
        if extent != train.activation_checkpointing and train.activation_checkpointing != "full":
            yield {"train.activation_checkpointing": extent}
    if mesh.fsdp * mesh.cp > 1 and not mesh.reshard_after_forward:
        yield {"mesh.reshard_after_forward": True}


def _meshes(job: Job) -> Iterator[dict[str, Any]]:
    """Yields meshes of more devices, smallest first."""
    mesh, pipeline = job.mesh, job.pipeline
    factor = 2
    while factor <= _MOST_DEVICES:
        if pipeline.microbatches % factor == 0:
            wider = {"mesh.fsdp": mesh.fsdp * factor, "pipeline.microbatches": pipeline.microbatches // factor}
            yield wider
            yield {**wider, "mesh.reshard_after_forward": True}
        if pipeline.layers_per_stage is None:
            yield {"mesh.pp": mesh.pp * factor}
        factor *= 2
