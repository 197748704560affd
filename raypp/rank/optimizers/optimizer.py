"""Builds optimizers, and begins their updates."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from raypp.errors import JobError, Problem
from raypp.job.job import OptimizerOptions
from raypp.job.optimizer_groups import group_of
from raypp.kinds import OPTIMIZERS
from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.rank.optimizers.reduce import scale


def build_optimizer(
    stages: Iterable[nn.Module], options: OptimizerOptions, precision: str = "fp32", seed: int = 0
) -> torch.optim.Optimizer:
    """Builds the job's optimizer over the parameters of this rank's stages that are trained.

    Weight decay is decoupled and applies to matrices only (not to norm gains and biases). Under
    FSDP muon's step is collective over ranks that share weights. Others do not communicate.

    An optimizer is a module of this package with a `KIND` and `build(named, options, precision)`,
    where `named` pairs parameters with their global names. Muon recognises hidden matrices by their
    place in `model.layers`. `precision` decides the dtype of its iteration, and whether weights are
    updated by stochastic rounding, whose seed is `seed`. Raises JobError: an optimizer of the
    user's own does not form `train.optimizer.groups`.
    """
    named = [(n, parameter) for stage in stages for n, parameter in stage.named_parameters() if parameter.requires_grad]
    build = OPTIMIZERS.get(options.kind, key="train.optimizer.kind").build()
    optimizer = cast(torch.optim.Optimizer, build(named, options, precision))
    if options.groups and any("lr_factor" not in group for group in optimizer.param_groups):
        fault = f"{options.kind} does not form them (raypp.rank.optimizers.optimizer.decay_groups)"
        raise JobError(Problem("train.optimizer.groups", fault, "remove the key, or use adamw, muon or sgd"))
    if (weights := bf16_weights(optimizer)) is not None:
        weights.seed = seed
    return optimizer


def bf16_weights(optimizer: torch.optim.Optimizer) -> Bf16Weights | None:
    """Returns how an optimizer updates bf16 weights; None if it cannot."""
    weights = getattr(optimizer, "weights", None)
    return weights if isinstance(weights, Bf16Weights) else None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix or a stack of them. Biases of experts `[E, n]` are not, nor
    the weights of depthwise convolutions, `[C, 1, n]`."""
    depthwise = name.endswith(("conv1d.weight", "conv.weight")) and parameter.ndim > 1 and parameter.shape[1] == 1
    return parameter.ndim > 1 and not name.endswith("bias") and not depthwise


def decay_groups(named: Sequence[tuple[str, nn.Parameter]], options: OptimizerOptions) -> list[dict[str, Any]]:
    """Returns torch parameter groups by `weight_decay` and `lr_factor`: only matrices decay. A rank
    without parameters has one empty group: torch wants at least one."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        own = group_of(name, options.groups)
        decay = options.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        key = (decay if is_matrix(name, parameter) else 0.0, 1.0 if own is None else own.lr_factor)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        for (decay, factor), parameters in (groups or {(options.weight_decay, 1.0): []}).items()
    ]


def begin_update(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], factor: float, rate: float, step: int
) -> None:
    """Prepares an optimizer's next step: scale of the gradients, learning rate, random numbers.
    `optimizer`: from `build_optimizer`. `gradients`: the local part `[...]` of every gradient.
    Scaled in place, except those of bf16 weights: they would be rounded, so the optimizer scales
    them in fp32. `factor`: what gradients are multiplied by."""
    weights = bf16_weights(optimizer)
    if weights is not None:
        weights.step = step
    if weights is not None and weights.any:
        weights.factor = factor
    else:
        scale(gradients, factor)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
