"""Reads and writes parameters that may be sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raypp.torch_private import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor `[...]`, or the tensor itself if it is not one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zero_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros `[...]` as a parameter's gradient, on the device that computes.

    The parameter's own memory may be in host memory (`train.optimizer_offload`).
    """
    return torch.zeros_like(parameter, device=parameter.device)


@torch.no_grad()
def write_whole(parameter: Tensor, value: Tensor) -> None:
    """Copies this rank's slice of a whole tensor into a parameter. Not collective.

    Args:
        parameter: A plain tensor or a DTensor, of global shape `[...]`.
        value: The whole value `[...]`, of the same global shape, on the CPU.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        value = value.narrow(dim, start, length) if length else value.narrow(dim, 0, 0)
    local = parameter.to_local()
    if local.numel():
        local.copy_(value)


def counts_here(parameter: Tensor) -> bool:
    """Returns whether this rank counts its part of a parameter `[...]` in a sum over the world.

    Along replicated axes, several ranks hold the same part. Only the first of them counts it.
    """
    if not isinstance(parameter, DTensor):
        return True
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    return all(
        index == 0 for index, layout in zip(place, parameter.placements, strict=True) if isinstance(layout, Replicate)
    )
