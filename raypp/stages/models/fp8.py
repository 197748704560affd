"""Matrix products in fp8 (e4m3), for `train.precision: fp8` and `model.lora.base: fp8`.

Every row of the input, every output channel of the matrix and every row of a gradient has a scale
of its own (arXiv:2209.05433 has the format), so no cut between rows and no other microbatch changes
a bit. Ranks that have parts of a row (mesh.tp) take the largest number of all of it. The gradient
of the input takes the same fp8 matrix: its scales are multiplied into the rows of the gradient
before these get theirs. The gradient of the matrix is a product in bf16.

On a CPU the same numbers are multiplied in fp32. Only the order of a sum is another.

Legend: N rows, C width of the input, O width of the output, E experts. Matrices of experts are
`[E, O, C]`, and their rows are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.errors import RayppError
from raypp.job.fp8 import experts_in_fp8, layer_in_fp8, matrices_in_fp8
from raypp.job.job import Job
from raypp.job.lora import FP8_WIDTH
from raypp.stages.models.grouped_products import held
from raypp.stages.models.products import Projection, grouped_linear, is_transposed, linear, stack_gradient
from raypp.stages.models.tensor_ranks import WHOLE, MatrixCut, TensorRanks, weight_here
from raypp.torch_private import scaled_grouped_mm

_ROW_WISE = F.ScalingType.RowWise
E4M3 = torch.float8_e4m3fn


def rows_in_fp8(
    x_NC: Tensor, factors: Tensor | None = None, experts_N: Tensor | None = None, ranks: TensorRanks | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows `[..., N, C]` in e4m3, and their scales, fp32 `[..., N, 1]`. A row with a number
    that is not finite becomes NaN. Plain operators, so that the compiler fuses them with what comes
    before. `factors`: what rows are multiplied by before, `[1, C]`; or `[E, C]`, with the expert of
    each row, `[N]`. `ranks`: those that have the other parts of each row."""
    wide_NC = x_NC.float()
    if factors is not None:
        wide_NC = wide_NC * (factors if experts_N is None else factors[experts_N])
    largest_N1 = wide_NC.abs().amax(-1, keepdim=True)
    if ranks is not None:  # a maximum over ranks may pass over NaN
        largest_N1 = ranks.largest(largest_N1.masked_fill(largest_N1.isnan(), torch.inf))
    # Compiled, several products in a block cannot share a float of the module (torch 2.13).
    largest, least = torch.finfo(E4M3).max, torch.finfo(torch.float32).tiny
    scale_N1 = (largest_N1 / largest).clamp(min=least)
    return (wide_NC / scale_N1).to(E4M3), scale_N1


@cache
def fused_rows() -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns `rows_in_fp8` as one kernel, for blocks of experts, which are not compiled."""
    return torch.compile(rows_in_fp8, dynamic=True)


def _multiply(
    a_NK: Tensor, b_OK: Tensor, a_scale_N1: Tensor, b_scale_O1: Tensor, dtype: torch.dtype, ends: Tensor | None = None
) -> Tensor:
    """Returns a · bᵀ `[N, O]` of e4m3 rows and their scales. `ends`: where each expert's rows end;
    then b is `[E, O, K]`."""
    if ends is not None and a_NK.device.type == "cpu":
        spans = [slice(*span) for span in pairwise((0, *ends.tolist()))]
        parts = zip((a_NK[span] for span in spans), b_OK, (a_scale_N1[span] for span in spans), b_scale_O1, strict=True)
        return torch.cat([_multiply(*part, dtype) for part in parts])
    if a_NK.device.type == "cpu":
        wide = torch.promote_types(dtype, torch.float32)
        return (F.linear(a_NK.to(wide), b_OK.to(wide)) * a_scale_N1 * b_scale_O1.t()).to(dtype)
    wide = torch.bfloat16  # cards have no other
    if ends is not None:
        scales = a_scale_N1.squeeze(-1), b_scale_O1.squeeze(-1)
        return scaled_grouped_mm(a_NK, b_OK.mT, *scales, offs=ends, out_dtype=wide).to(dtype)
    out = F.scaled_mm(a_NK, b_OK.t(), a_scale_N1, _ROW_WISE, b_scale_O1.t(), _ROW_WISE, output_dtype=wide)
    return out.to(dtype)


class _Product(torch.autograd.Function):
    """x · Wᵀ. `rows`, `scales`, `columns`: the matrix in e4m3 `[O, C]`, its scales `[O, 1]`, and
    its transpose `[C, O]`; made here if they are None. `ends`: where each expert's rows end, int32
    `[E]`; then these are of stacks. `cast`: `rows_in_fp8`, or the same as one kernel. `cut`: how
    ranks share the product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        rows: Tensor | None,
        scales: Tensor | None,
        columns: Tensor | None,
        ends: Tensor | None,
        cast: Callable[..., tuple[Tensor, Tensor]],
        cut: MatrixCut,
    ) -> Tensor:
        """Returns the product `[..., O]` of x `[..., C]`."""
        trained = weight is not None and weight.requires_grad
        ctx.save_for_backward(x if trained else None, weight if rows is None else None, rows, scales, columns, ends)
        ctx.cast, ctx.cut, ctx.transposed = cast, cut, weight is not None and is_transposed(weight)
        if rows is None or scales is None:
            assert weight is not None
            rows, scales = rows_in_fp8(weight.contiguous(), ranks=cut.inputs)
        x_NC, x_scales = cast(x.reshape(-1, x.shape[-1]), ranks=cut.inputs)
        return _multiply(x_NC, rows, x_scales, scales, x.dtype, ends).view(*x.shape[:-1], rows.shape[-2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x `[..., C]` and of the matrix `[O, C]`."""
        x, weight, rows, scales, columns, ends = ctx.saved_tensors
        grad_NO, x_grad, weight_grad = grad.reshape(-1, grad.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            if rows is None:
                rows, scales = rows_in_fp8(weight.contiguous(), ranks=ctx.cut.inputs)
            if columns is None:
                columns = rows.mT.contiguous()
            factors, experts_N = scales.mT, None
            if ends is not None:
                ordered_N = torch.arange(len(grad_NO), dtype=ends.dtype, device=grad.device)
                factors, experts_N = scales.squeeze(-1), torch.searchsorted(ends, ordered_N, right=True)
            fp8_NO, row_scales = ctx.cast(ctx.cut.once(grad_NO), factors, experts_N, ctx.cut.gradients)
            ones = torch.ones(*columns.shape[:-1], 1, dtype=torch.float32, device=grad.device)
            x_grad = _multiply(fp8_NO, columns, row_scales, ones, grad.dtype, ends).view(
                *grad.shape[:-1], columns.shape[-2]
            )
        if x is not None and ends is not None:
            weight_grad = stack_gradient(x, grad_NO, ends_E=ends, transposed=ctx.transposed)
        elif x is not None:
            weight_grad = grad_NO.t() @ x.reshape(-1, x.shape[-1])
        return x_grad, weight_grad, None, None, None, None, None, None


def frozen_product(
    x: Tensor,
    rows: Tensor,
    scales: Tensor,
    ends: Tensor | None = None,
    cast: Callable[..., tuple[Tensor, Tensor]] = rows_in_fp8,
    cut: MatrixCut = WHOLE,
) -> Tensor:
    """Returns x · Wᵀ `[..., O]` of x `[..., C]` and a frozen matrix in e4m3 `[O, C]` with scales
    `[O, 1]`. `ends`, `cast`, `cut`: as in `_Product`."""
    return _Product.apply(x, None, rows, scales, None, ends, cast, cut)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class InFp8:
    """The matrix of one expert, or the same matrix of all experts that a rank holds. `weight`: `[O,
    C]` or `[E, O, C]`. The rest is as in `_Product`."""

    weight: Tensor
    rows: Tensor | None
    scales: Tensor | None
    columns: Tensor | None
    cast: Callable[..., tuple[Tensor, Tensor]]

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def unbind(self) -> list[InFp8]:
        """Returns the experts, one by one."""
        forms = (repeat(None) if part is None else part.unbind() for part in (self.rows, self.scales, self.columns))
        parts = zip(self.weight.unbind(), *forms, strict=False)
        return [InFp8(weight, rows, scales, columns, self.cast) for weight, rows, scales, columns in parts]

    def product(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Multiplies rows `[N, C]` by the matrix, or by those of their experts: `[N, O]`."""
        if ends_E is None:
            return linear(x, self.weight, None, self._times)
        return grouped_linear(x, self.weight, ends_E, self._times)

    def _times(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        return _Product.apply(x, weight, self.rows, self.scales, self.columns, ends, self.cast, WHOLE)  # type: ignore[no-any-return, no-untyped-call]


class Fp8Matrix(nn.Module):
    """The fp8 form of a layer's matrix, as `Projection.fp8`, or of a stack of experts', in
    `ExpertStacks.fp8`. `kept`: it is made once a step, and kept for the step; else in each product,
    as the matrix itself is gathered for each. `cast`: of a stack's rows, as in `_Product`. `cut`:
    as there; the form is of the part of this rank."""

    def __init__(
        self, weight: Tensor, *, kept: bool, cast: Callable[..., Any] = rows_in_fp8, cut: MatrixCut = WHOLE
    ) -> None:
        super().__init__()
        *experts, rows, columns = weight.shape
        empty = partial(torch.empty, device=weight.device)
        self.due, self.cast, self.cut = kept, cast, cut
        self.register_buffer("rows", empty(*experts, rows, columns, dtype=E4M3) if kept else None, persistent=False)
        scales = empty(*experts, rows, 1, dtype=torch.float32) if kept else None
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("columns", empty(*experts, columns, rows, dtype=E4M3) if kept else None, persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x · Wᵀ + b, `[..., O]`, of `[..., C]`, `[O, C]` and `[O]`."""
        form = self.rows, self.scales, self.columns
        out: Tensor = _Product.apply(x, weight, *form, None, rows_in_fp8, self.cut)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    def stack(self, weight: Tensor) -> InFp8:
        """Returns the step's matrices of experts `[E, O, C]` with their fp8 form."""
        self.take(weight)
        return InFp8(weight, self.rows, self.scales, self.columns, self.cast)  # type: ignore[arg-type]

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Makes the fp8 form of the step's weights `[..., O, C]`, once."""
        if self.due:
            rows, scales = rows_in_fp8(weight, ranks=self.cut.inputs)
            self.rows.copy_(rows)  # type: ignore[operator]
            self.scales.copy_(scales)  # type: ignore[operator]
            self.columns.copy_(rows.mT)  # type: ignore[operator]
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
            part.fp8 = Fp8Matrix(weight_here(part), kept=kept, cut=part.cut)  # type: ignore[arg-type]
        for stack in experts_in_fp8(job, int(index)):
            inside, _, name = stack.name.rpartition(".")
            experts, cast = block.get_submodule(inside), fused_rows() if job.train.compiles else rows_in_fp8
            weight = held(experts.get_parameter(name))
            form = Fp8Matrix(weight.mT if stack.transposed else weight, kept=kept, cast=cast)
            experts.fp8 = nn.ModuleDict({**(experts.fp8 or {}), name: form})  # type: ignore[dict-item]
        if kept:  # FSDP puts its hook, which gathers the weights, before this one
            block.register_forward_pre_hook(partial(_take_weights, parts))


def _take_weights(parts: Sequence[Any], _block: nn.Module, _arguments: Any) -> None:
    """Makes what the matrices of a block keep of the step's weights in fp8."""
    for part in parts:
        part.fp8.take(weight_here(part))
