"""Optimizers and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from raypp.spec.job import LrSchedule, OptimizerOptions, TrainSection


def build_optimizer(stages: Iterable[nn.Module], options: OptimizerOptions) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay on matrices only (norm gains and biases are left alone)."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.lr, betas=options.betas, eps=options.eps, fused=True
    )


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
