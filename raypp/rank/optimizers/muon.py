"""Muon: orthogonalised momentum for the matrices of the hidden layers, AdamW for the rest.

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982, section 2.2): an update is
multiplied by 0.2 · sqrt(max(rows, columns)), which gives it the typical root mean square of AdamW's
updates. So one learning rate, AdamW's, fits both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raypp.job.job import OptimizerOptions
from raypp.job.precision import PRECISIONS
from raypp.kinds import OptimizerKind
from raypp.rank.optimizers.adamw import adamw_over
from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.rank.optimizers.optimizer import decay_groups, is_matrix
from raypp.stages.models.quantised import torch_dtype
from raypp.stages.parallel.shard import local_part

KIND = OptimizerKind(
    "muon", "orthogonalised momentum for matrices, AdamW for the rest", position=3, states=1, bf16_weights=True
)

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS = 0.2


def build(named: list[tuple[str, nn.Parameter]], options: OptimizerOptions, precision: str) -> Muon:
    """Builds Muon over named parameters; hidden matrices are those below `model.layers`."""
    weights = Bf16Weights(named)
    hidden = {id(p) for name, p in named if name.startswith("model.layers.") and is_matrix(name, p)}
    return Muon(
        decay_groups([(name, p) for name, p in named if id(p) in hidden], options) if hidden else (),
        decay_groups([(name, p) for name, p in named if id(p) not in hidden], options),
        lambda groups: adamw_over(groups, options, precision, weights),
        lr=options.lr,
        momentum=options.momentum,
        dtype=torch_dtype(PRECISIONS[precision].compute),
        weights=weights,
    )


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximates the nearest (semi-)orthogonal matrix, with singular values from 0.7 to 1.2.

    A quintic Newton-Schulz iteration: X <- a X + (b A + c A²) X with A = X Xᵀ, five times, from X =
    M / |M|. The coefficients are Jordan's: chosen for a steep start, not for convergence to 1.
    torch's own takes one matrix, and always in bf16. `matrix`: `[..., rows, columns]`; leading dims
    are batches of independent matrices. `dtype`: the dtype of the iteration. fp32 keeps meshes
    within 1e-5 of each other; the method was published with bf16. Returns `[..., rows, columns]`,
    of `dtype`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = (matrix.mT if tall else matrix).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with one list of groups and one state.

    The state is `momentum_buffer` for hidden matrices and AdamW's own for the rest. Under FSDP a
    step is collective over ranks that share weights: one gathers and updates each matrix.

    Args:
        matrices: Groups of parameters of the hidden layers, `[..., rows, columns]` (leading dims:
            experts), with their `weight_decay`.
        rest: AdamW's groups, in the form its constructor takes.
        adamw: Builds AdamW from these groups.
        lr: Learning rate of both.
        momentum: Coefficient of the moving average; Nesterov momentum is always on.
        dtype: The dtype of the Newton-Schulz iteration.
        weights: Reads gradients and writes the matrices.
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        lr: float,
        momentum: float,
        dtype: torch.dtype,
        weights: Bf16Weights,
    ) -> None:
        self._adamw = adamw(list(rest)) if rest else None
        groups = list(self._adamw.param_groups) if self._adamw is not None else []
        groups += [{**group, "momentum": momentum, "muon": True} for group in matrices]
        super().__init__(groups, {"lr": lr, "muon": False})
        self._dtype, self.weights = dtype, weights
        if self._adamw is not None:
            # Shares groups and state: setting a rate or loading a checkpoint sees one optimizer.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._adamw is not None:
            self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        momentum: float = group["momentum"]

        def ahead(index: int) -> Tensor:
            """Returns this rank's part `[...]` of the Nesterov momentum, of its shard's shape."""
            parameter = parameters[index]
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            average = local_part(state["momentum_buffer"])
            gradient = self.weights.gradient(parameter).view(average.shape)
            average.lerp_(gradient, 1 - momentum)
            return gradient.lerp(average, momentum)

        def update(whole: Tensor) -> Tensor:
            """Orthogonalises a `[..., rows, columns]` matrix; keeps its dtype."""
            return orthogonalised(whole, self._dtype).to(whole.dtype)

        for index, direction in apply_to_whole(parameters, ahead, update):
            parameter = parameters[index]
            values = self.weights.values(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * _RMS * max(parameter.shape[-2:]) ** 0.5
            self.weights.write(parameter, values.add_(direction.reshape(values.shape), alpha=-rate))


@dataclass(frozen=True)
class _Layout:
    """How a tensor is sharded: along `dim` over the ranks of `group`, as `torch.chunk` cuts.
    `within`: how tp has cut it before, into equal parts."""

    group: dist.ProcessGroup
    dim: int
    within: _Layout | None = None

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
    holds at most one whole tensor at a time. Replicas each compute it from equal parts.

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
    shared: dict[tuple[int, int, int | None], tuple[_Layout, list[int]]] = {}
    for index, parameter in enumerate(parameters):
        layout = _layout(parameter)
        if layout is None:
            yield index, function(part(index))
        else:
            inner = None if layout.within is None else layout.within.dim
            shared.setdefault((id(layout.group), layout.dim, inner), (layout, []))[1].append(index)
    for layout, indices in shared.values():
        ranks = layout.group.size()
        by_size = sorted(indices, key=lambda index: -parameters[index].numel())
        for start in range(0, len(by_size), ranks):
            turn = by_size[start : start + ranks]
            parts = [part(index) for index in turn]
            shapes = [list(own.shape) for own in parts]
            for shape, index in zip(shapes, turn, strict=True):
                shape[layout.dim] = parameters[index].shape[layout.dim]
                if layout.within is not None and layout.within.dim == layout.dim:
                    shape[layout.dim] //= layout.within.group.size()
            compute = function if layout.within is None else partial(_over_parts, layout.within, function)
            yield from zip(turn, _one_each(layout, shapes, parts, compute), strict=True)


def _layout(parameter: Tensor) -> _Layout | None:
    """Returns how a parameter `[..., M, N]` is sharded within its matrices. None if this rank holds
    whole matrices, all of them or some."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, layout = parameter.device_mesh, None
    for axis, placement in reversed(list(enumerate(parameter.placements))):  # tp is the last
        dim = getattr(placement, "dim", -1)  # of a shard of any kind
        if dim >= max(0, parameter.ndim - 2) and mesh.size(axis) > 1:
            layout = _Layout(mesh.get_group(axis), dim, layout)
    return layout


def _over_parts(layout: _Layout, function: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
    """Applies a function of whole matrices to this rank's equal part of some. Every rank of the
    group computes them. Collective over it."""
    parts = [torch.empty_like(part) for _ in range(layout.group.size())]
    dist.all_gather(parts, part.contiguous(), group=layout.group)
    return function(torch.cat(parts, dim=layout.dim)).chunk(len(parts), dim=layout.dim)[layout.group.rank()]


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
