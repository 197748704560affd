"""The process groups of a rank: one mesh, and one more group per pipeline direction.

Rank order is that of `raypp.mesh`: pp slowest, then dp_replicate, fsdp, cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raypp.records import Coordinates

AXES = ("pp", "dp_replicate", "fsdp", "cp")


@dataclass(frozen=True)
class RankGroups:
    """What a rank talks through.

    Attributes:
        mesh: Device mesh with the axes pp, dp_replicate, fsdp, cp.
        forward: This rank's pipeline, for activations.
        backward: The same ranks, for gradients: on gloo one group serialises the two directions of a
            link (measured: half the bandwidth each way), two do not.
        coordinates: This rank's place.
    """

    mesh: DeviceMesh
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    coordinates: Coordinates

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The mesh weights are sharded over: 1-D (fsdp) or 2-D (dp_replicate, fsdp); None when both are 1."""
        replicate, shard = self.mesh["dp_replicate"].size(), self.mesh["fsdp"].size()
        if replicate > 1:
            return self.mesh["dp_replicate", "fsdp"]
        return self.mesh["fsdp"] if shard > 1 else None


def make_groups(sizes: Coordinates, device_type: str) -> RankGroups:
    """Builds the mesh and the pipeline groups. Collective over the world."""
    shape = tuple(getattr(sizes, axis) for axis in AXES)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    place = mesh.get_coordinate()
    if place is None:
        raise RuntimeError(f"rank {dist.get_rank()} is outside a mesh of {shape}")
    return RankGroups(
        mesh=mesh,
        forward=mesh["pp"].get_group(),
        backward=_backward_group(shape),
        coordinates=Coordinates(*place),
    )


def _backward_group(shape: tuple[int, ...]) -> dist.ProcessGroup:
    """A second group over every pipeline; all ranks make all of them, in one order, and keep their own."""
    columns = torch.arange(dist.get_world_size()).view(shape[0], -1).T.tolist()
    own: dist.ProcessGroup | None = None
    for ranks in columns:
        group = dist.new_group(ranks, group_desc="pp_backward")
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own
