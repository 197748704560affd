"""Every mesh of a number of ranks, and the best one when there are fewer than the job asks for.

All who look for a mesh ask `shapes`, so that all obey the same rules of what divides what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from raypp.records import Coordinates


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


def shapes(
    world: int, *, rows: int = 0, cp: int = 0, ep: int = 1, longest: Coordinates | None = None
) -> Iterator[Coordinates]:
    """Yields the sizes of meshes; pp varies slowest, then fsdp, cp and dp_replicate.

    Args:
        world: Number of ranks: exactly this many or, with `longest`, at most.
        rows: What the replicas must divide, so that a step keeps its rows; 0: any number of them.
        cp: Context-parallel ranks; 0: any number.
        ep: Expert-parallel ranks, which must divide fsdp · cp.
        longest: The longest that each axis may be.
    """

    def lengths(room: int, axis: str) -> Sequence[int]:
        return divisors(room) if longest is None else range(1, min(room, getattr(longest, axis)) + 1)

    for pp in lengths(world, "pp"):
        for fsdp in lengths(world // pp, "fsdp"):
            left = world // pp // fsdp
            for own_cp in [cp] if cp else lengths(left, "cp"):
                if (fsdp * own_cp) % ep or (longest is None and left % own_cp):
                    continue
                room = left // own_cp
                for dp_replicate in [room] if longest is None else lengths(room, "dp_replicate"):
                    if not rows or rows % (dp_replicate * fsdp) == 0:
                        yield Coordinates(pp, dp_replicate, fsdp, own_cp)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, ascending.

    Fast for products of small numbers, such as the rows of a step.
    """
    found, prime = [1], 2
    while number > 1:
        if prime * prime > number:
            prime = number
        powers = [1]
        while number % prime == 0:
            number //= prime
            powers.append(powers[-1] * prime)
        found = [one * power for power in powers for one in found]
        prime += 1
    return sorted(found)


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
    rows = wanted.microbatches_per_step
    longest = Coordinates(wanted.pp, wanted.dp_replicate, wanted.fsdp, wanted.cp)
    meshes = shapes(most, rows=rows, cp=wanted.cp, ep=wanted.ep, longest=longest)
    for one in sorted(meshes, key=lambda one: (-one.pp, -one.dp_replicate * one.fsdp, -one.fsdp)):
        each = rows // (one.dp_replicate * one.fsdp)
        shape = replace(wanted, pp=one.pp, dp_replicate=one.dp_replicate, fsdp=one.fsdp, microbatches=each)
        if shape.world >= min_ranks and usable(shape):
            return shape
    return None
