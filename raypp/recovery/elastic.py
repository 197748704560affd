"""Which mesh to go on with when there are fewer devices than the job asks for: a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """What of a job a change of size touches.

    Attributes:
        cp: Context-parallel ranks; never changed.
        ep: Expert-parallel ranks; never changed.
        microbatches: Of each replica and step.
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
        """Over all replicas: with the rows of a microbatch, the global batch, and so the order of the data."""
        return self.replicas * self.microbatches


def best_shape(
    wanted: Shape,
    devices: int,
    usable: Callable[[Shape], bool] = lambda shape: True,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
) -> Shape | None:
    """The largest shape for so many devices that takes the same rows in every step as the job does.

    Replicas are given up before pipeline stages: the cut of the model, and with it the memory of a rank, stays. Of
    the replicas, those that hold all weights go before those that share them. Only when one replica does not fit
    does the pipeline become shorter. Fewer replicas have more microbatches each.

    Args:
        wanted: The job's own shape, which is never exceeded.
        devices: Ranks there is room for.
        usable: Whether a shape can run at all (schedule, cut, memory).
        min_ranks: A smaller world is not worth it.
        max_ranks: A larger one is not wanted.

    Returns:
        The shape; None when there is none.
    """
    most = min(devices, wanted.world if max_ranks is None else max_ranks)
    for shape in _in_order(wanted):
        if min_ranks <= shape.world <= most and usable(shape):
            return shape
    return None


def _in_order(wanted: Shape) -> Iterator[Shape]:
    """Every smaller shape with the same rows per step, the best first."""
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
