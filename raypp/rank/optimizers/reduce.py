"""Sums the loss and the gradient norm over all ranks with one collective; no mesh changes the bits.

The squared norm of every trained parameter has its own place in one vector over all their names, in
a fixed order. Ranks that do not hold a parameter contribute exact zeros. After the sum over the
world, every rank adds the vector up in the same order. So a pipeline of any cut gives the bits of a
single process.

Legend: P trained parameters of the model, N extra numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypp.stages.models.stage import tied_copies
from raypp.stages.parallel.compute_copies import round_gradient
from raypp.stages.parallel.rank_groups import check_groups
from raypp.stages.parallel.shard import counts_here, local_part, zero_gradient
from raypp.stages.parallel.tensor import is_split
from raypp.torch_private import foreach_mul_, foreach_norm


@dataclass(frozen=True)
class GlobalSums:
    """Sums over all ranks. `grad_norm`: 2-norm of the undivided gradient sum. `extra`: `[N]`, fp64,
    on the CPU: sums of the extra numbers. `squares`: `[P]`, fp64, on the CPU: squared norm of each
    parameter's gradient, in the order of the names."""

    loss: float
    grad_norm: float
    extra: Tensor
    squares: Tensor


class GradientReducer:
    """Computes sums over the gradients of this rank's stages. Frozen parameters have none. `names`:
    global names of all P trained parameters of the model, in the order of the sum. `group`: the
    ranks whose gradients belong together: of this replica, if it trains apart. None: all ranks.
    `first`: whether this rank is the first of its tp group, whose ranks all have the gradients that
    are not split. `factor`: by what gradients are scaled, a power of two; norms are divided by it.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        names: Sequence[str],
        group: dist.ProcessGroup | None = None,
        *,
        first: bool = True,
    ) -> None:
        index_of = {name: index for index, name in enumerate(names)}
        self.names, self.group = list(names), group
        held = [(name, parameter, stage) for stage in stages for name, parameter in stage.named_parameters()]
        self._device, self.factor = held[0][1].device, 1.0
        trained = [part for part in held if part[1].requires_grad]
        self._places = torch.tensor([index_of[name] for name, _, _ in trained], dtype=torch.int64).to(self._device)
        self._parameters = [parameter for _, parameter, _ in trained]
        counted = [
            counts_here(parameter) and name not in tied_copies(stage) and (first or is_split(parameter))
            for name, parameter, stage in trained
        ]
        self._counted = torch.tensor(counted, dtype=torch.float64).to(self._device)

    def gradients(self) -> list[Tensor]:
        """Returns the local part `[...]` of every gradient; zeros if a parameter has none."""
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            round_gradient(parameter)
            gradients.append(local_part(parameter.grad))
        return gradients

    def sums(self, gradients: Sequence[Tensor], loss_sum: Tensor, extra: Tensor) -> GlobalSums:
        """Computes the global loss sum and gradient norm.

        Collective over the world: every rank must call it once per step. On a GPU all tensors stay
        there, NCCL adds them up, and `read` is the only place where the host waits for the step.

        Args:
            gradients: From `gradients()`: local shards `[...]`.
            loss_sum: Sum of this rank's token losses, fp64 `[]`; 0 on ranks without the last stage,
                and on all but one of the ranks that computed the same loss.
            extra: `[N]`, fp64: more numbers to sum over the world; N is the same on every rank.
        """
        vector = torch.zeros(len(self.names), dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(_norms(gradients)).double()
            # Added, not assigned: both ends of a tied embedding may be here; they share a place.
            vector.index_add_(0, self._places, norms.square() * self._counted)
        vector = torch.cat((vector, loss_sum.view(1), extra))
        dist.all_reduce(vector, group=self.group)
        return self.read(vector)

    def read(self, sums: Tensor) -> GlobalSums:
        """Copies the sums `[P + 1 + N]` to the host, and waits for them: the step's only wait. The
        copy follows the last backward and the reduction of gradients on the device, so whether the
        step is finite is known before anything changes a weight (design record 0027). Raises
        DistBackendError: a communicator failed meanwhile, so the sums say nothing."""
        sums, end = sums.cpu(), len(self.names)
        check_groups()  # after an abort the device computes on with data that was never received
        squares = sums[:end] / self.factor**2
        norm = math.sqrt(float(squares.sum()))
        if self.factor != 1 and math.isnan(norm):
            norm = math.inf  # what sums of infinite numbers are depends on their order
        return GlobalSums(float(sums[end]), norm, sums[end + 1 :], squares)


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm `[]` of every gradient `[...]`, at least in fp32."""
    if any(gradient.dtype == torch.bfloat16 for gradient in gradients):
        return [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return list(foreach_norm(list(gradients)))


def coefficient(grad_norm: float, tokens: int, clip_norm: float | None) -> float:
    """Returns the factor for the accumulated gradients: 1 / tokens, and the clip to a global norm.
    `grad_norm`: norm of the undivided sum. `clip_norm`: largest norm of the mean gradient; None: no
    clipping."""
    mean_norm = grad_norm / tokens
    if clip_norm is None or mean_norm <= clip_norm:
        return 1.0 / tokens
    return clip_norm / mean_norm / tokens


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies every local gradient `[...]` by `factor`, in place."""
    if gradients:
        foreach_mul_(list(gradients), factor)
