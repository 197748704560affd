"""Ranks and their coordinates, in the order of `raypp.records.AXES`: pp slowest, cp fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import TypeVar

from raypp.job.job import MeshSection
from raypp.records import AXES, Coordinates

T = TypeVar("T")

_NAMES = tuple(axis.name for axis in AXES)


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
        """The number of ranks."""
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
        """Returns the rank at given coordinates."""
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
