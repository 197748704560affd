"""The device memory that a job's ranks need at their peaks, and whether a device has it."""

from __future__ import annotations

from collections.abc import Sequence

from raypp.planning.activations import Kind
from raypp.planning.memory import RankMemory, memories
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.stored_bytes import size_text
from raypp.spec.job import Job

CERTAIN = 0.9
"""A job is refused only if this share of its planned memory is more than a device has."""


def rank_memories(job: Job, kind: Kind | None = None) -> list[RankMemory]:
    """Returns what every pipeline rank holds at its peak."""
    pipeline = resolve_pipeline(job)
    return list(memories(job, pipeline, pipeline.simulator(), kind))


def memory_of_ranks(job: Job, kind: Kind | None = None) -> list[int]:
    """Returns the bytes of every pipeline rank at its peak."""
    return [memory.total for memory in rank_memories(job, kind)]


def peak_memory(job: Job, kind: Kind | None = None) -> int:
    """Returns the bytes of the rank that needs most."""
    return max(memory_of_ranks(job, kind))


def too_little(needs: Sequence[int], capacity: int) -> str:
    """Returns which pipeline ranks certainly need more memory than a device has; "" if none does.

    Args:
        needs: Planned bytes by pipeline rank (`memory_of_ranks`).
        capacity: Bytes of the device.
    """
    large = [f"pp{rank} {size_text(need)}" for rank, need in enumerate(needs) if CERTAIN * need > capacity]
    if not large:
        return ""
    listed = ", ".join(large[:8]) + (f" and {len(large) - 8} more" if len(large) > 8 else "")
    return f"a device has {size_text(capacity)}; ranks are planned to need more: {listed}"
