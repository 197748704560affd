"""Kernels in Triton for products of rows with the matrices of their experts, without host waits.

For cards on which torch's own grouped product loops over the experts on the host. A result's row
depends on its own row and matrix only, and a matrix's gradient adds its rows in order, so no bits
depend on timing. TRITON_INTERPRET=1 runs them on a CPU.

Legend: N rows sorted by expert, I columns of a row, O of a result, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 128, 32
"""Rows and columns of the result that a program computes, and how many values it adds at a time."""


def by_expert(rows_NI: Tensor, stack_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows `[N, I]` by the transposed matrices of their experts: `[N, O]`. `rows_NI`:
    sorted by expert."""
    rows, width = rows_NI.shape
    experts, columns, _ = stack_EOI.shape
    out = rows_NI.new_empty(rows, columns)
    # Each expert has at most one tile that is not full. The tiles left over do nothing.
    grid = (triton.cdiv(rows, ROWS) + experts, triton.cdiv(columns, COLUMNS))
    _by_expert[grid](
        rows_NI, stack_EOI, ends_E, out, experts, width, columns, *rows_NI.stride(), *stack_EOI.stride(),
        SIDE=triton.next_power_of_2(experts), ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=4,
    )  # fmt: skip
    return out


def of_matrices(gradient_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the gradient `[E, O, I]` of the matrices; that of an expert without rows is zero."""
    experts, columns, width = len(ends_E), gradient_NO.shape[1], rows_NI.shape[1]
    out = torch.empty(experts, columns, width, dtype=rows_NI.dtype, device=rows_NI.device)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(width, COLUMNS), experts)
    _of_matrices[grid](
        gradient_NO, rows_NI, ends_E, out, columns, width, *gradient_NO.stride(), *rows_NI.stride(),
        SIDE=COLUMNS, DEPTH=DEPTH, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _by_expert(
    rows, stack, ends, out, experts, width, columns, row_stride, value_stride, expert_stride, out_stride, in_stride,
    SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    number = tl.arange(0, SIDE)
    end = tl.load(ends + number, mask=number < experts, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    last = tl.cumsum((end - begin + ROWS - 1) // ROWS, 0)
    before = (last <= tile) & (number < experts)
    expert = tl.sum(before.to(tl.int32), 0)
    if expert < experts:
        own = number == expert
        first = tl.sum(tl.where(own, begin, 0), 0) + (tile - tl.max(tl.where(before, last, 0), 0)) * ROWS
        row = first + tl.arange(0, ROWS)
        exists = row < tl.sum(tl.where(own, end, 0), 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = stack + expert.to(tl.int64) * expert_stride
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, width, DEPTH):
            at = k + tl.arange(0, DEPTH)
            left = tl.load(
                rows + row.to(tl.int64)[:, None] * row_stride + at[None, :] * value_stride,
                mask=exists[:, None] & (at < width)[None, :], other=0,
            )  # fmt: skip
            right = tl.load(
                matrix + column[None, :] * out_stride + at[:, None] * in_stride,
                mask=(column < columns)[None, :] & (at < width)[:, None], other=0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision="ieee")
        place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=exists[:, None] & (column < columns)[None, :])


@triton.jit
def _of_matrices(
    gradient, rows, ends, out, columns, width, gradient_stride, gradient_value, row_stride, value_stride,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    at = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        left = tl.load(
            gradient + row.to(tl.int64)[None, :] * gradient_stride + column[:, None] * gradient_value,
            mask=(row < end)[None, :] & (column < columns)[:, None], other=0,
        )  # fmt: skip
        right = tl.load(
            rows + row.to(tl.int64)[:, None] * row_stride + at[None, :] * value_stride,
            mask=(row < end)[:, None] & (at < width)[None, :], other=0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    place = out + (expert.to(tl.int64) * columns + column)[:, None] * width + at[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (at < width)[None, :])
