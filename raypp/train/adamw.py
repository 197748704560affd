"""AdamW: torch's fused implementation; by rows for bf16 weights and 8-bit moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raypp.kinds import OptimizerKind
from raypp.spec.job import OptimizerOptions
from raypp.spec.precision import PRECISIONS
from raypp.train.adamw_by_rows import AdamWByRows
from raypp.train.bf16_weights import Bf16Weights
from raypp.train.optimizer import decay_groups

KIND = OptimizerKind("adamw", "Adam with decoupled weight decay", position=1, states_in_8bit=True, bf16_weights=True)


def build(named: list[tuple[str, nn.Parameter]], options: OptimizerOptions, precision: str) -> torch.optim.Optimizer:
    """Builds AdamW over named parameters."""
    groups = decay_groups(named, options.weight_decay)
    if not PRECISIONS[precision].narrow_weights and options.state == "fp32":
        return adamw_of(groups, options)
    return adamw_by_rows(groups, options, Bf16Weights(named))


def adamw_by_rows(groups: list[dict[str, Any]], options: OptimizerOptions, weights: Bf16Weights) -> AdamWByRows:
    """Builds AdamW for bf16 weights or 8-bit moments, over groups with their own `weight_decay`."""
    quantised = options.state == "8bit"
    return AdamWByRows(groups, weights, lr=options.lr, betas=options.betas, eps=options.eps, quantised=quantised)


def adamw_of(groups: list[dict[str, Any]], options: OptimizerOptions) -> torch.optim.AdamW:
    """Builds AdamW over parameter groups that carry their own `weight_decay`."""
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
