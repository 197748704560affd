"""Experts with biases and a clamped SwiGLU, as gpt-oss has them.

Gate and up are one matrix with alternating columns, and matrices are stored as `[in, out]`.

Legend: E experts, N rows sent to experts, n rows of one expert, C residual width, F inner width of
an expert. With experts spread over ranks, a rank holds part of the E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from raypp.models.experts import ExpertStacks, can_group, held
from raypp.models.lora import Matrix, Stack, grouped_product, product, unbound
from raypp.models.once import once

ALPHA, LIMIT = 1.702, 7.0
"""Factor of the gate in its sigmoid, and the bound of gate and up."""
NAMES = ("fused_gate_up_proj", "fused_gate_up_proj_bias", "fused_down_proj", "fused_down_proj_bias")


class ClampedExperts(ExpertStacks):
    """E gated feed-forward blocks: down((up + 1) · gate · σ(α · gate)).

    Parameters: gate and up `[E, C, 2F]` and `[E, 2F]`, down `[E, F, C]` and `[E, C]`.

    Args:
        count: E.
        width: C.
        inner: F.
    """

    names = NAMES

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        for name, shape in zip(NAMES, ((width, 2 * inner), (2 * inner,), (inner, width), (width,)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape)))

    def forward(self, rows_NC: Tensor, counts_E: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Runs every expert on its rows, as `raypp.models.experts.StackedExperts` does.

        Args:
            rows_NC: Rows sorted by expert, `[N, C]`.
            counts_E: Rows for each expert held here, int64 `[E]`.
            counts: The same on the host. None: not known yet.

        Returns:
            The results `[N, C]`, in the same order.
        """
        gate_up, down = (self.stack(name, transposed=True) for name in NAMES[::2])
        biases = [held(getattr(self, name)) for name in NAMES[1::2]]
        if can_group(rows_NC, gate_up) and can_group(rows_NC, down):
            return grouped(rows_NC, counts_E, gate_up, biases[0], down, biases[1])
        if counts is None:
            counts = once(lambda: cast(list[int], counts_E.tolist()))
        parts = torch.split(rows_NC, list(counts))
        of_expert = [*map(_unbound, (gate_up, down)), *(bias.unbind() for bias in biases)]
        out = [
            affine(clamped_swiglu(affine(part_nC, first, bias)), second, down_bias)
            for index, (part_nC, first, second, bias, down_bias) in enumerate(zip(parts, *of_expert, strict=True))
            # A rank without rows runs one expert on zero rows, as in `one_by_one`.
            if len(part_nC) or (index == 0 and not len(rows_NC))
        ]
        return torch.cat(out)


def _unbound(stack: Stack) -> Sequence[Matrix]:
    """Returns the matrices of a stack, expert by expert, and keeps the layout of its gradient."""
    return [matrix.mT for matrix in stack.mT.unbind()] if isinstance(stack, Tensor) else unbound(stack)


def affine(rows: Tensor, matrix: Matrix, bias: Tensor) -> Tensor:
    """Multiplies rows `[n, in]` by an expert's matrix and adds its bias: `[n, out]`."""
    return torch.addmm(bias, rows, matrix.mT) if isinstance(matrix, Tensor) else product(rows, matrix) + bias


def grouped(
    rows_NC: Tensor, counts_E: Tensor, gate_up: Stack, gate_up_bias: Tensor, down: Stack, down_bias: Tensor
) -> Tensor:
    """Runs all experts with one kernel per matrix: `[N, C]` to `[N, C]`, in bf16."""
    ends = counts_E.cumsum(0).to(torch.int32)
    of_row_N = torch.repeat_interleave(counts_E, output_size=len(rows_NC))
    inner = grouped_product(rows_NC, gate_up, ends) + gate_up_bias[of_row_N]
    return grouped_product(clamped_swiglu(inner), down, ends) + down_bias[of_row_N]


def clamped_swiglu(gate_up_N2F: Tensor) -> Tensor:
    """Returns (up + 1) · gate · σ(α · gate) of bounded gates and ups `[N, 2F]`: `[N, F]`."""
    out: Tensor = _ClampedSwiglu.apply(gate_up_N2F)  # type: ignore[no-untyped-call]
    return out


class _ClampedSwiglu(torch.autograd.Function):
    """`clamped_swiglu`. Keeps only its input: plain operators would keep four times as much."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """Returns `[N, F]` for `[N, 2F]`."""
        ctx.save_for_backward(gate_up)
        gate = gate_up[..., ::2].clamp(max=LIMIT)
        up = gate_up[..., 1::2].clamp(min=-LIMIT, max=LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the gradient `[N, 2F]` of the input, given that of the output, `[N, F]`."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        low, bounded = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
        share = torch.sigmoid(low * ALPHA)
        slope = share * (1 + ALPHA * low * (1 - share))
        result = torch.empty_like(gate_up)
        result[..., ::2] = grad * (bounded + 1) * slope * (gate <= LIMIT)
        result[..., 1::2] = grad * low * share * (up.abs() <= LIMIT)
        return result
