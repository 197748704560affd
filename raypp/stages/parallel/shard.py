"""Reads and writes parameters that may be sharded."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raypp.torch_private import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor `[...]`, or the tensor itself if it is not one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_own_device(tensor: Tensor) -> Tensor:
    """Returns a tensor `[...]` whose local part is on its device. That of a weight may be in host
    memory (`train.optimizer_offload`), where NCCL cannot gather it."""
    if not isinstance(tensor, DTensor) or tensor.to_local().device.type == tensor.device.type:
        return tensor
    return sharded_like(tensor, tensor.to_local().detach().to(tensor.device), tensor.shape)


def sharded_like(tensor: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    """Returns a tensor of a global shape `[...]`, sharded like another, given this rank's part."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def zero_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros `[...]` as a parameter's gradient, on the device that computes. The parameter's
    own memory may be in host memory (`train.optimizer_offload`)."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype, device=parameter.device)


def counts_here(parameter: Tensor) -> bool:
    """Returns whether this rank counts its part of a parameter `[...]` in a sum over the world.
    Along replicated axes, several ranks hold the same part. Only the first of them counts it."""
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        index == 0
        for index, layout in zip(coordinate, parameter.placements, strict=True)
        if isinstance(layout, Replicate)
    )


@dataclass(frozen=True)
class LocalRows:
    """Where this rank's part of a parameter lies in the whole one, seen as a matrix of rows.

    Attributes:
        rows_R: Numbers of this rank's rows in the whole, int64 `[R]`, on the parameter's device.
            All dims but the last count the rows; a vector is one row.
        start: This rank's first column.
        width: Columns of the whole.
    """

    rows_R: Tensor
    start: int
    width: int


def local_rows(parameter: Tensor) -> LocalRows:
    """Returns the place of this rank's part of a parameter `[..., L]`, sharded or not."""
    if parameter.ndim == 0:
        return LocalRows(torch.zeros(1, dtype=torch.int64, device=parameter.device), 0, 1)
    whole, offset = tuple(parameter.shape), (0,) * parameter.ndim
    local = tuple(local_part(parameter).shape)
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    rows = torch.zeros((), dtype=torch.int64, device=local_part(parameter).device)
    for dim in range(len(whole) - 1):
        indices = torch.arange(offset[dim], offset[dim] + local[dim], device=rows.device)
        rows = rows.unsqueeze(-1) + indices * prod(whole[dim + 1 : -1])
    return LocalRows(rows.reshape(-1), offset[-1], whole[-1])


def zeros_beside(parameter: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros that are sharded like a parameter, and have its shape but for the last dim.
    `last`: the global size of that. If it is sharded, it must be cut into equal parts."""
    shape = torch.Size((*parameter.shape[:-1], last))
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    local, _ = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return sharded_like(parameter, torch.zeros(local, dtype=dtype, device=parameter.to_local().device), shape)
