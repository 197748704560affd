"""Optimizers and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from raypp.parallel.shard import local_part
from raypp.spec.job import LrSchedule, OptimizerOptions, TrainSection
from raypp.train.muon import Muon


def build_optimizer(
    stages: Iterable[nn.Module], options: OptimizerOptions, precision: str = "fp32"
) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters of some stages.

    Weight decay is decoupled from the gradient and works on matrices only (norm gains and biases are left alone). Under
    FSDP a step of muon is collective over the ranks that share the weights; the others need no communication.

    Args:
        stages: This rank's stages; muon tells hidden matrices by their place in `model.layers`.
        options: `train.optimizer`.
        precision: `train.precision`; what muon's iteration is computed in.
    """
    named = [(name, parameter) for stage in stages for name, parameter in stage.named_parameters()]
    if options.kind == "sgd":
        return Sgd(_groups([p for _, p in named], options.weight_decay), options.lr, options.momentum)
    if options.kind == "muon":
        hidden = {id(p) for name, p in named if name.startswith("model.layers.") and p.ndim > 1}
        return Muon(
            [p for _, p in named if id(p) in hidden],
            _groups([p for _, p in named if id(p) not in hidden], options.weight_decay),
            lambda groups: _adamw(groups, options),
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            dtype=torch.bfloat16 if precision == "bf16" else torch.get_default_dtype(),
        )
    return _adamw(_groups([p for _, p in named], options.weight_decay), options)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], options: OptimizerOptions) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)


class Sgd(torch.optim.SGD):
    """Gradient descent with momentum and decoupled weight decay (torch's own adds the decay to the gradient, where the
    momentum gathers it up).

    w <- w · (1 - lr · decay), then v <- momentum · v + g, w <- w - lr · v (SGDW, arXiv:1711.05101, algorithm 1).

    Args:
        groups: Parameters and `weight_decay` of each group.
        lr: Learning rate.
        momentum: Of v; 0 keeps no state.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__([{**g, "decay": g["weight_decay"], "weight_decay": 0.0} for g in groups], lr, momentum)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            if group["decay"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        local_part(parameter).mul_(1 - group["lr"] * group["decay"])
        super().step()


def learning_rate(step: int, train: TrainSection) -> float:
    """The learning rate of a step, 1-based: linear warm-up, then the schedule's shape down to min_ratio at the end.

    A function of the step alone, so that nothing of it needs saving.
    """
    peak, schedule = train.optimizer.lr, train.lr_schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    return peak * _shape(step, train.steps, schedule)


def _shape(step: int, steps: int, schedule: LrSchedule) -> float:
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * fall


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
