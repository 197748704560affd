"""Chooses a mesh when there are fewer devices than the job asks for: a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """The part of a job that a change of size affects.

    Attributes:
        cp: Context-parallel ranks; never changed.
        ep: Expert-parallel ranks; never changed.
        microbatches: Per replica and step.
    """

    pp: int
    dp_replicate: int
    fsdp: int
    cp: int
    ep: int
    microbatches: int

    @property
    def world(self) -> int:
        return self.pp * self.replicas * self.cp

    @property
    def replicas(self) -> int:
        return self.dp_replicate * self.fsdp

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches of all replicas; they fix the global batch, and with it the order of the
        data."""
        return self.replicas * self.microbatches


def best_shape(
    wanted: Shape,
    devices: int,
    usable: Callable[[Shape], bool] = lambda shape: True,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
) -> Shape | None:
    """Returns the largest shape for the devices that takes the same rows in every step as the job
    does.

    Replicas are given up before pipeline stages, which keeps the cut of the model and the memory of
    a rank. Among replicas, `dp_replicate` shrinks before `fsdp`. The pipeline becomes shorter only
    when one replica does not fit. Fewer replicas have more microbatches each.

    Args:
        wanted: The job's own shape, which is never exceeded.
        devices: Ranks for which there is room.
        usable: Whether a shape can run at all (schedule, cut, memory).
        min_ranks: The smallest world allowed.
        max_ranks: The largest world allowed.

    Returns:
        The shape; None when there is none.
    """
    most = min(devices, wanted.world if max_ranks is None else max_ranks)
    for shape in _in_order(wanted):
        if min_ranks <= shape.world <= most and usable(shape):
            return shape
    return None


def _in_order(wanted: Shape) -> Iterator[Shape]:
    """Yields every shape up to `wanted` with the same rows per step, best first."""
    total = wanted.microbatches_per_step
    for pp in range(wanted.pp, 0, -1):
        pairs = [
            (dp_replicate, fsdp)
            for dp_replicate in range(1, wanted.dp_replicate + 1)
            for fsdp in range(1, wanted.fsdp + 1)
            if total % (dp_replicate * fsdp) == 0 and (fsdp * wanted.cp) % wanted.ep == 0
        ]
        for dp_replicate, fsdp in sorted(pairs, key=lambda pair: (-pair[0] * pair[1], -pair[1])):
            yield replace(
                wanted, pp=pp, dp_replicate=dp_replicate, fsdp=fsdp, microbatches=total // (dp_replicate * fsdp)
            )
