"""Gradients of bf16 weights that are summed over microbatches in fp32.

Where FSDP manages a stage, it does that itself (`MixedPrecisionPolicy.reduce_dtype`; after separate
backwards of weights, `torch_private.add_to_sums`), and rounds the sum over all ranks to bf16.
Elsewhere torch's autograd does it, if a parameter says so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def sum_in_fp32(stage: nn.Module) -> None:
    """Makes the gradients of a stage's bf16 parameters fp32. Not for stages that FSDP manages."""
    for parameter in stage.parameters():
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def fill_wide_gradients(stages: Iterable[nn.Module]) -> None:
    """Sets gradients that are wider than their parameter, and not there yet, to zero.

    Called before the backwards of a step: a backward that computes weight gradients separately adds
    to the gradient that is there, and would create it in the parameter's dtype.
    """
    for stage in stages:
        for parameter in stage.parameters():
            wide = parameter.requires_grad and parameter.grad_dtype not in (None, parameter.dtype)
            if wide and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def round_gradient(parameter: Tensor) -> None:
    """Rounds the wide gradient of a parameter `[...]` to the parameter's dtype, in place.

    Call it once the sum is complete.

    So a weight has the same gradient with and without FSDP, up to the order of the sum.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != parameter.dtype:
        gradient.copy_(gradient.to(parameter.dtype))
