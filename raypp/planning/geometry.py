"""Ranks and their coordinates, in the order of `raypp.records.AXES`: pp slowest, tp fastest. Every
mesh of a number of ranks, and the best one when there are fewer than the job asks for.

All who look for a mesh ask `shapes`, so that all obey the same rules of what divides what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import TypeVar

from raypp.job.job import MeshSection
from raypp.records import AXES, ONE_RANK, Axis, Coordinates

T = TypeVar("T")

_NAMES = tuple(axis.name for axis in AXES)
(_REPLICATE,) = (axis for axis in AXES if axis.name == "dp_replicate")


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks. `ep`: size of an expert-parallel group; it divides fsdp · cp."""

    sizes: Coordinates
    ep: int = 1

    @classmethod
    def of(cls, section: MeshSection) -> Mesh:
        """Builds the mesh of a job's `mesh:` section."""
        return cls(section.sizes, section.ep)

    @property
    def world(self) -> int:
        return self.sizes.world

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank. Raises IndexError: the rank is outside the mesh."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside a mesh of {self.world}")
        indices = []
        for axis in reversed(_NAMES):
            rank, index = divmod(rank, getattr(self.sizes, axis))
            indices.append(index)
        return Coordinates(*reversed(indices))

    def places(self) -> Iterator[Coordinates]:
        """Yields the coordinates of every rank, by rank."""
        return starmap(Coordinates, product(*map(range, self.sizes.as_dict().values())))

    def labels(self) -> list[str]:
        """Returns the coordinates of every rank as text: `pp0-fsdp1`."""
        return [place.label(self.sizes) for place in self.places()]

    def rank(self, place: Coordinates) -> int:
        rank = 0
        for axis in _NAMES:
            rank = rank * getattr(self.sizes, axis) + getattr(place, axis)
        return rank

    def groups(self, axis: str | Sequence[str]) -> list[list[int]]:
        """Returns the groups of ranks that differ only along one axis, or along several. Groups are
        ordered by their first rank; ranks ascend within a group."""
        along = (axis,) if isinstance(axis, str) else tuple(axis)
        unknown = [name for name in along if name not in _NAMES]
        if unknown:
            raise KeyError(f"no axis {unknown[0]!r}; there are {', '.join(_NAMES)}")
        firsts, offsets, stride = [0], [0], 1
        for name in reversed(_NAMES):
            steps = range(0, stride * getattr(self.sizes, name), stride)
            if name in along:
                offsets = [step + offset for step in steps for offset in offsets]
            else:
                firsts = [step + first for step in steps for first in firsts]
            stride *= len(steps)
        return [[first + offset for offset in offsets] for first in firsts]


def of_pipeline_rank(mesh: Mesh, seats: Sequence[T], pp: int) -> list[T]:
    """Returns what belongs to the ranks of a pipeline rank, by rank, of a list over all ranks."""
    each = mesh.world // mesh.sizes.pp  # pp is the slowest axis
    return list(seats[pp * each : (pp + 1) * each])


@dataclass(frozen=True)
class Shape(Coordinates):
    """The part of a job that a change of size affects: the length of each axis, and two more. `ep`:
    expert-parallel ranks; never changed. `microbatches`: per replica and step."""

    ep: int = 1
    microbatches: int = 1

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches of all replicas; they fix the global batch, and so the order of the data."""
        return self.replicas * self.microbatches


def shapes(
    world: int,
    *,
    rows: int = 0,
    keep: Coordinates | None = None,
    ep: int = 1,
    longest: Coordinates | None = None,
    tp: Sequence[int] = (),
) -> Iterator[Coordinates]:
    """Yields the sizes of meshes; pp varies slowest, then the others, dp_replicate fastest.

    Args:
        world: Number of ranks: exactly this many or, with `longest`, at most.
        rows: What the replicas must divide, so that a step keeps its rows; 0: any number of them.
        keep: The mesh whose fixed axes, cp and tp, keep their lengths; None: they have any.
        ep: Expert-parallel ranks, which must divide fsdp · cp.
        longest: The longest that each axis may be.
        tp: The lengths that tp may have; none: as the others.
    """

    def lengths(room: int, axis: Axis) -> Sequence[int]:
        if axis.name == "tp" and tp:
            return [one for one in tp if room % one == 0]
        if keep is not None and axis.fixed:
            own = getattr(keep, axis.name)
            return [own] if longest is not None or room % own == 0 else []
        return divisors(room) if longest is None else range(1, min(room, getattr(longest, axis.name)) + 1)

    def extended(sizes: Coordinates, room: int, axes: Sequence[Axis]) -> Iterator[Coordinates]:
        for length in lengths(room, axes[0]):
            longer = replace(sizes, **{axes[0].name: length})
            if len(axes) > 1:
                yield from extended(longer, room // length, axes[1:])
            elif longer.shards % ep == 0:
                for dp_replicate in [room // length] if longest is None else lengths(room // length, _REPLICATE):
                    if not rows or rows % (dp_replicate * longer.replicas) == 0:
                        yield replace(longer, dp_replicate=dp_replicate)

    yield from extended(ONE_RANK, world, [axis for axis in AXES if axis is not _REPLICATE])


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, ascending. Fast for products of small numbers,
    such as the rows of a step."""
    divisors, prime = [1], 2
    while number > 1:
        if prime * prime > number:
            prime = number
        powers = [1]
        while number % prime == 0:
            number //= prime
            powers.append(powers[-1] * prime)
        divisors = [one * power for power in powers for one in divisors]
        prime += 1
    return sorted(divisors)


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

    Returns:
        The shape; None when there is none.
    """
    most = min(devices, wanted.world if max_ranks is None else max_ranks)
    rows = wanted.microbatches_per_step
    meshes = shapes(most, rows=rows, keep=wanted, ep=wanted.ep, longest=wanted)
    for one in sorted(meshes, key=lambda one: (-one.pp, -one.replicas, -one.fsdp)):
        shape = replace(wanted, **one.as_dict(), microbatches=rows // one.replicas)
        if shape.world >= min_ranks and usable(shape):
            return shape
    return None
