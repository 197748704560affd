"""Loss and gradient norm over the whole mesh, by one collective whose result no mesh changes.

The norm of every parameter is squared and put at that parameter's place in one vector over all names of the model,
in a fixed order; ranks that do not hold a parameter contribute exact zeros. After the sum over the world every rank
adds the vector up in the same order. So a pipeline of any cut gives the bits of the one-process run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypp.parallel.shard import counts_here, local_part
from raypp.torch_private import foreach_mul_, foreach_norm


@dataclass(frozen=True)
class GlobalSums:
    """Over all ranks.

    Attributes:
        loss: Sum of token losses.
        grad_norm: 2-norm of the undivided gradient sum.
        extra: Sums of what else was given.
        squares: Squared norm of each parameter's gradient, fp64, in the order of the names.
    """

    loss: float
    grad_norm: float
    extra: Tensor
    squares: Tensor


class GradientReducer:
    """Sums, scales and clips the gradients of this rank's stages.

    Args:
        stages: This rank's stages, sharded or not.
        names: Global names of all parameters of the model, in the order that fixes the sum.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Sequence[str]) -> None:
        place = {name: index for index, name in enumerate(names)}
        self._size = len(names)
        self.names = list(names)
        own = [(name, parameter, stage) for stage in stages for name, parameter in stage.named_parameters()]
        self._places = torch.tensor([place[name] for name, _, _ in own], dtype=torch.int64)
        self._parameters = [parameter for _, parameter, _ in own]
        counted = [
            counts_here(parameter) and name not in getattr(stage, "tied_copies", ()) for name, parameter, stage in own
        ]
        self._counted = torch.tensor(counted, dtype=torch.float64)

    def gradients(self) -> list[Tensor]:
        """The local part of every gradient; a parameter that got none has a gradient of zero."""
        found = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(local_part(parameter.grad))
        return found

    def sums(self, gradients: Sequence[Tensor], loss_sum: float, extra: Tensor | None = None) -> GlobalSums:
        """The global loss sum and gradient norm. Collective over the world: all must call it, once per step.

        Args:
            gradients: From `gradients()`.
            loss_sum: Sum of this rank's token losses; 0 where the last stage is elsewhere, and on all but one of
                the ranks that computed the same loss.
            extra: More numbers to add up over the world, fp64 `[n]`, as many on every rank.
        """
        more = torch.zeros(0, dtype=torch.float64) if extra is None else extra
        vector = torch.zeros(self._size, dtype=torch.float64)
        if gradients:
            norms = torch.stack(foreach_norm(list(gradients))).double().cpu()
            # Added, not assigned: the two ends of a tied embedding may both be here, and have one place.
            vector.index_add_(0, self._places, norms.square() * self._counted)
        vector = torch.cat((vector, torch.tensor([loss_sum], dtype=torch.float64), more))
        dist.all_reduce(vector)
        end = self._size
        return GlobalSums(float(vector[end]), math.sqrt(float(vector[:end].sum())), vector[end + 1 :], vector[:end])


def coefficient(grad_norm: float, tokens: int, clip_norm: float | None) -> float:
    """What the accumulated gradients are multiplied with: 1 / tokens, and the clip to a global norm in the same go.

    Args:
        grad_norm: Norm of the undivided sum.
        tokens: Global count of tokens with a label, > 0.
        clip_norm: Largest norm of the mean gradient; None: no clipping.
    """
    mean_norm = grad_norm / tokens
    if clip_norm is None or mean_norm <= clip_norm:
        return 1.0 / tokens
    return clip_norm / mean_norm / tokens


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies every local gradient in place."""
    if gradients:
        foreach_mul_(list(gradients), factor)
