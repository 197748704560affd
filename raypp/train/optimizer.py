"""Builds optimizers, and begins their updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from raypp.kinds import OPTIMIZERS
from raypp.spec.job import OptimizerOptions
from raypp.train.bf16_weights import Bf16Weights
from raypp.train.reduce import scale


def build_optimizer(
    stages: Iterable[nn.Module], options: OptimizerOptions, precision: str = "fp32", seed: int = 0
) -> torch.optim.Optimizer:
    """Builds the job's optimizer over the parameters of this rank's stages that are trained.

    Weight decay is decoupled from the gradient and applies to matrices only (not to norm gains and
    biases). Under FSDP a step of muon is collective over the ranks that share the weights. The
    other optimizers do not communicate.

    An optimizer is a module of this package with a `KIND` and `build(named, options, precision)`,
    where `named` pairs parameters with their global names.

    Args:
        stages: This rank's stages; muon recognises hidden matrices by their place in
            `model.layers`.
        options: `train.optimizer`.
        precision: `train.precision`; decides the dtype of muon's iteration, and whether weights are
            updated by stochastic rounding.
        seed: `train.seed`, of that rounding.
    """
    named = [(n, parameter) for stage in stages for n, parameter in stage.named_parameters() if parameter.requires_grad]
    build = OPTIMIZERS.get(options.kind, key="train.optimizer.kind").build()
    optimizer = cast(torch.optim.Optimizer, build(named, options, precision))
    if (weights := bf16_weights(optimizer)) is not None:
        weights.seed = seed
    return optimizer


def bf16_weights(optimizer: torch.optim.Optimizer) -> Bf16Weights | None:
    """Returns how an optimizer updates bf16 weights; None if it cannot."""
    weights = getattr(optimizer, "weights", None)
    return weights if isinstance(weights, Bf16Weights) else None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix or a stack of them; biases of experts `[E, n]` are not."""
    return parameter.ndim > 1 and not name.endswith("bias")


def decay_groups(named: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Returns torch parameter groups: only matrices decay.

    Without parameters (a rank may train none) there is one empty group: torch wants at least one.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if is_matrix(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not is_matrix(name, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def begin_update(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], factor: float, rate: float, step: int
) -> None:
    """Prepares an optimizer's next step: scale of the gradients, learning rate, random numbers.

    Args:
        optimizer: From `build_optimizer`.
        gradients: The local part `[...]` of every gradient. Scaled in place, except those of bf16
            weights: they would be rounded, so the optimizer scales them in fp32.
        factor: What gradients are multiplied by.
    """
    weights = bf16_weights(optimizer)
    if weights is not None:
        weights.step = step
    if weights is not None and weights.any:
        weights.factor = factor
    else:
        scale(gradients, factor)
    for group in optimizer.param_groups:
        group["lr"] = rate
