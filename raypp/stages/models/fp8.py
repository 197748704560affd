"""Matrix products in fp8 (e4m3), for `train.precision: fp8` and `model.lora.base: fp8`.

Every row of the input, every output channel of the matrix and every row of a gradient has a scale
of its own (arXiv:2209.05433 has the format), so no cut between rows and no other microbatch changes
a bit. The gradient of the input takes the same fp8 matrix: its scales are multiplied into the rows
of the gradient before these get theirs. The gradient of the matrix is a product in bf16.

On a CPU the same numbers are multiplied in fp32. Only the order of a sum is another.

Legend: N rows, C width of the input, O width of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.errors import RayppError
from raypp.job.fp8 import layer_in_fp8, matrices_in_fp8
from raypp.job.job import Job
from raypp.job.lora import FP8_WIDTH
from raypp.job.precision import LARGEST_FP8
from raypp.stages.models.products import Projection

_ROW_WISE = F.ScalingType.RowWise
E4M3 = torch.float8_e4m3fn
_TINY = torch.finfo(torch.float32).tiny


def rows_in_fp8(x_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows `[N, C]` in e4m3, and their scales, fp32 `[N, 1]`. A row with a number that is
    not finite becomes NaN. Plain operators, so that the compiler fuses them with what comes
    before."""
    wide_NC = x_NC.float()
    scale_N1 = (wide_NC.abs().amax(-1, keepdim=True) / LARGEST_FP8).clamp(min=_TINY)
    return (wide_NC / scale_N1).to(E4M3), scale_N1


def _multiply(a_NK: Tensor, b_OK: Tensor, a_scale_N1: Tensor, b_scale_O1: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a · bᵀ `[N, O]` of e4m3 rows and their scales."""
    if a_NK.device.type == "cpu":
        return (F.linear(a_NK.float(), b_OK.float()) * a_scale_N1 * b_scale_O1.t()).to(dtype)
    out = F.scaled_mm(a_NK, b_OK.t(), a_scale_N1, _ROW_WISE, b_scale_O1.t(), _ROW_WISE, output_dtype=torch.bfloat16)
    return out.to(dtype)  # cards have bf16 only


class _Product(torch.autograd.Function):
    """x · Wᵀ. `rows`, `scales`, `columns`: the matrix in e4m3 `[O, C]`, its scales `[O, 1]`, and
    its transpose `[C, O]`; made here if they are None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, rows: Tensor | None, scales: Tensor | None, columns: Tensor | None
    ) -> Tensor:
        """Returns the product `[..., O]` of x `[..., C]`."""
        trained = weight is not None and weight.requires_grad
        ctx.save_for_backward(x if trained else None, weight if rows is None else None, rows, scales, columns)
        if rows is None or scales is None:
            assert weight is not None
            rows, scales = rows_in_fp8(weight)
        x_NC, x_scales = rows_in_fp8(x.reshape(-1, x.shape[-1]))
        return _multiply(x_NC, rows, x_scales, scales, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x `[..., C]` and of the matrix `[O, C]`."""
        x, weight, rows, scales, columns = ctx.saved_tensors
        grad_NO, x_grad, weight_grad = grad.reshape(-1, grad.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            if rows is None:
                rows, scales = rows_in_fp8(weight)
            if columns is None:
                columns = rows.t().contiguous()
            fp8_NO, row_scales = rows_in_fp8(grad_NO.float() * scales.t())
            ones_C1 = torch.ones(len(columns), 1, dtype=torch.float32, device=grad.device)
            x_grad = _multiply(fp8_NO, columns, row_scales, ones_C1, grad.dtype).view(*grad.shape[:-1], -1)
        if x is not None:
            weight_grad = grad_NO.t() @ x.reshape(-1, x.shape[-1])
        return x_grad, weight_grad, None, None, None


def frozen_product(x: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
    """Returns x · Wᵀ `[..., O]` of x `[..., C]` and a frozen matrix in e4m3 `[O, C]` with scales
    `[O, 1]`."""
    return _Product.apply(x, None, rows, scales, None)  # type: ignore[no-any-return, no-untyped-call]


class Fp8Matrix(nn.Module):
    """The fp8 form of a layer's matrix, as `Projection.fp8`. `kept`: it is made once a step, and
    kept for the step; else in each product, as the matrix itself is gathered for each."""

    def __init__(self, weight: Tensor, *, kept: bool) -> None:
        super().__init__()
        rows, columns = weight.shape
        empty = partial(torch.empty, device=weight.device)
        self.due = kept
        self.register_buffer("rows", empty(rows, columns, dtype=E4M3) if kept else None, persistent=False)
        self.register_buffer("scales", empty(rows, 1, dtype=torch.float32) if kept else None, persistent=False)
        self.register_buffer("columns", empty(columns, rows, dtype=E4M3) if kept else None, persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x · Wᵀ + b, `[..., O]`, of `[..., C]`, `[O, C]` and `[O]`."""
        out: Tensor = _Product.apply(x, weight, self.rows, self.scales, self.columns)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Makes the fp8 form of the step's weights `[O, C]`, once."""
        if self.due:
            rows, scales = rows_in_fp8(weight)
            self.rows.copy_(rows)  # type: ignore[operator]
            self.scales.copy_(scales)  # type: ignore[operator]
            self.columns.copy_(rows.t())  # type: ignore[operator]
            self.due = False


def kept_matrices(stage: nn.Module) -> Iterator[Fp8Matrix]:
    """Yields the fp8 forms that a stage keeps for a step."""
    return (part for part in stage.modules() if isinstance(part, Fp8Matrix) and part.rows is not None)


def compute_in_fp8(stage: nn.Module, job: Job, *, kept: bool) -> None:
    """Gives the matrices of a stage that the job names products in fp8; of the user's own model all
    whose widths allow it. The stage is on the meta device, neither sharded nor compiled. `kept`:
    see `Fp8Matrix`. Raises RayppError: a layer of an own model has no such matrix."""
    own = ":" in job.model.kind
    for index, block in stage.get_submodule("model.layers").named_children():
        if not layer_in_fp8(job, int(index)):
            continue
        parts = [block.get_submodule(one.name.removesuffix(".weight")) for one in matrices_in_fp8(job, int(index))]
        if own:
            linear = [part for part in block.modules() if isinstance(part, Projection)]
            parts = [part for part in linear if not (part.in_features % FP8_WIDTH or part.out_features % FP8_WIDTH)]
        if own and not parts:
            what = f"train.precision fp8: layer {index}, a {type(block).__name__}, has no nn.Linear whose widths are "
            raise RayppError(f"{what}multiples of {FP8_WIDTH}", "use train.precision bf16")
        for part in parts:
            part.fp8 = Fp8Matrix(part.weight, kept=kept)  # type: ignore[arg-type]
        if kept:  # FSDP puts its hook, which gathers the weights, before this one
            block.register_forward_pre_hook(partial(_take_weights, parts))


def _take_weights(parts: Sequence[Any], _block: nn.Module, _arguments: Any) -> None:
    """Makes what the matrices of a block keep of the step's weights in fp8."""
    for part in parts:
        part.fp8.take(part.weight)
