"""AdamW: torch's fused implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raypp.kinds import OptimizerKind
from raypp.spec.job import OptimizerOptions
from raypp.train.optimizer import decay_groups

KIND = OptimizerKind("adamw", "Adam with decoupled weight decay", position=1)


def build(named: list[tuple[str, nn.Parameter]], options: OptimizerOptions, precision: str) -> torch.optim.AdamW:
    """Builds AdamW over named parameters."""
    return adamw_of(decay_groups([p for _, p in named], options.weight_decay), options)


def adamw_of(groups: list[dict[str, Any]], options: OptimizerOptions) -> torch.optim.AdamW:
    """Builds AdamW over parameter groups that carry their own `weight_decay`."""
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
