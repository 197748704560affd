"""Applies functions to whole tensors that are sharded: each is gathered on one rank only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard


@dataclass(frozen=True)
class _Layout:
    """How a tensor is sharded: along `dim` over the ranks of `group`, as `torch.chunk` cuts."""

    group: dist.ProcessGroup
    dim: int

    def shape(self, whole: Sequence[int], rank: int) -> list[int]:
        """Returns the shape of a rank's part of a tensor of shape `whole`."""
        chunk = -(-whole[self.dim] // self.group.size())
        length = max(0, min(chunk, whole[self.dim] - rank * chunk))
        return [*whole[: self.dim], length, *whole[self.dim + 1 :]]


def apply_to_whole(
    parameters: Sequence[Tensor], part: Callable[[int], Tensor], function: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Applies a function of matrices to whole tensors and yields this rank's part of each result.

    Collective over the ranks that share the parameters: all of them must consume the iterator, with
    the same parameters in the same order. Of N ranks, each gathers, computes and returns every N-th
    tensor, the largest first. So each tensor is computed once and sent once each way, and a rank
    holds at most one whole tensor at a time. Replicas along replicated axes each compute the result
    from equal parts.

    A tensor with more than two dims is a stack of matrices (experts). If it is sharded between the
    matrices, it stays sharded.

    Args:
        parameters: The parameters `[..., M, N]`. Tensor i is sharded as parameter i is.
        part: Returns this rank's part of the tensor of an index. Called once per tensor, when its
            turn comes.
        function: Maps a tensor `[..., M, N]` to one of the same shape, matrix by matrix (the last
            two dims). It must depend on nothing else.

    Yields:
        The index and this rank's part of the result, not in the order of the indices.
    """
    shared: dict[tuple[int, int], tuple[_Layout, list[int]]] = {}
    for index, parameter in enumerate(parameters):
        layout = _layout(parameter)
        if layout is None:
            yield index, function(part(index))
        else:
            shared.setdefault((id(layout.group), layout.dim), (layout, []))[1].append(index)
    for layout, indices in shared.values():
        ranks = layout.group.size()
        by_size = sorted(indices, key=lambda index: -parameters[index].numel())
        for start in range(0, len(by_size), ranks):
            turn = by_size[start : start + ranks]
            parts = [part(index) for index in turn]
            shapes = [list(own.shape) for own in parts]
            for shape, index in zip(shapes, turn, strict=True):
                shape[layout.dim] = parameters[index].shape[layout.dim]
            yield from zip(turn, _one_each(layout, shapes, parts, function), strict=True)


def _layout(parameter: Tensor) -> _Layout | None:
    """Returns how a parameter `[..., M, N]` is sharded within its matrices. None if this rank holds
    whole matrices, all of them or some."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, layout = parameter.device_mesh, None
    for axis, placement in enumerate(parameter.placements):
        between = isinstance(placement, Shard) and placement.dim < parameter.ndim - 2
        if isinstance(placement, Shard) and not between and mesh.size(axis) > 1:
            if layout is not None:
                raise NotImplementedError(f"a parameter is sharded along two mesh axes: {parameter.placements}")
            layout = _Layout(mesh.get_group(axis), placement.dim)
    return layout


def _one_each(
    layout: _Layout, shapes: Sequence[Sequence[int]], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Applies the function to at most one tensor per rank of the group: rank i computes tensor i.
    Collective over the group. Returns this rank's part of each result, shaped like `parts`."""
    group, ranks, me = layout.group, layout.group.size(), layout.group.rank()
    own_shape = shapes[me] if me < len(shapes) else None
    out_sizes = [parts[i].numel() if i < len(parts) else 0 for i in range(ranks)]
    pieces = [layout.shape(own_shape, rank) for rank in range(ranks)] if own_shape is not None else []
    in_sizes = [prod(piece) for piece in pieces] or [0] * ranks
    # Both ways flat and contiguous: gloo writes to the wrong places of a strided tensor.
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(in_sizes))
    dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=group)

    answer = received
    if own_shape is not None:
        split = torch.split(received, in_sizes)
        whole = torch.cat([flat.view(piece) for flat, piece in zip(split, pieces, strict=True)], dim=layout.dim)
        result = function(whole).to(sent.dtype)
        lengths = [piece[layout.dim] for piece in pieces]
        answer = torch.cat([piece.reshape(-1) for piece in torch.split(result, lengths, dim=layout.dim)])
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, answer, out_sizes, in_sizes, group=group)
    return [flat.view(part.shape) for flat, part in zip(torch.split(back, out_sizes[: len(parts)]), parts, strict=True)]
