"""Muon: orthogonalised momentum for the matrices of the hidden layers, AdamW for the rest.

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982, section 2.2): an update is
multiplied by 0.2 · sqrt(max(rows, columns)), which gives it the typical root mean square of AdamW's
updates. So one learning rate, AdamW's, fits both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypp.job.job import OptimizerOptions
from raypp.job.precision import PRECISIONS
from raypp.kinds import OptimizerKind
from raypp.rank.optimizers.adamw import adamw_over
from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.rank.optimizers.optimizer import decay_groups, is_matrix
from raypp.stages.models.quantised import torch_dtype
from raypp.stages.parallel.shard import local_part
from raypp.stages.parallel.whole_tensors import apply_to_whole

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
    step is collective over the ranks that share the weights: each matrix is gathered on one of
    them, which computes its update.

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
        """Updates every parameter that has a gradient."""
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
