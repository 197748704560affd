"""Experts stacked into one tensor per matrix, and the ways rows take to them and back.

Those of gpt-oss have biases and a clamped SwiGLU. Their gate and up are one matrix with alternating
columns, and their matrices are stored as `[in, out]`.

Rows are sorted by expert with permutations only, so no sum depends on thread timing.

Legend: S tokens of a microbatch on this rank, E experts, K experts per token, N = S · K rows sent
to experts, n rows of one expert, C residual width, F inner width of an expert. With experts spread
over ranks, a rank holds part of the E experts and N is the number of rows it received.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.stages.models import fused
from raypp.stages.models.fp8 import Fp8Matrix, InFp8
from raypp.stages.models.grouped_products import held, spread_gradient, spread_rows, summed_rows, torch_groups
from raypp.stages.models.lora import Adapted, Matrix, Stack, grouped_product, product, unbound
from raypp.stages.models.products import linear
from raypp.stages.models.quantised import Format, Quantised
from raypp.stages.models.recomputed import once

Exchange = Callable[[Tensor], Callable[[nn.Module, Tensor], Tensor]]
"""`counts_E -> (experts, rows_NC) -> rows_NC`: runs rows on the ranks that hold their experts.

The rows `[N, C]` are sorted by expert. The results have the same shape and order. The second call
waits for what the first one asks the other ranks.
"""

_GROUPED_ALIGNMENT = 8
"""The grouped kernel needs widths that are multiples of 16 bytes: 8 in bf16."""


class ExpertStacks(nn.Module):
    """A block of experts. One parameter stacks the same matrix of all experts."""

    lora_scale = 1.0
    """The factor of adapters; `models.lora` sets it."""
    formats: Mapping[str, Format] = MappingProxyType({})
    """The formats of quantised stacks by name; `models.quantised` sets it."""
    transposed = False
    """The parameters are `[E, in, out]`."""
    names: tuple[str, ...]
    """The parameters of the matrices."""
    biases: tuple[str, ...] = ()
    """The parameters of the biases, `[E, out]`."""
    fp8: nn.ModuleDict | None
    """The fp8 forms of stacks by name (`models.fp8`); None: products are in the compute dtype."""
    one: Callable[..., Tensor]
    """Runs one expert: rows `[n, C]`, its matrices and biases, to `[n, C]`."""
    grouped: Callable[..., Tensor]
    """Runs all: rows `[N, C]`, counts `[E]`, the stacks and biases, to `[N, C]`."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = None

    def forward(self, rows_NC: Tensor, counts_E: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Runs every expert on its rows. The grouped kernel takes the counts from the device. The
        loop needs them on the host. `counts`: the same on the host. None: not known yet; the loop
        reads them. Returns the results `[N, C]`, in the same order."""
        stacks = [self.stack(name) for name in self.names]
        biases = [held(getattr(self, name)) for name in self.biases]
        if all(can_group(rows_NC, stack) for stack in stacks):
            return self.grouped(rows_NC, counts_E, *stacks, *biases)
        if counts is None:
            counts = once(lambda: cast(list[int], counts_E.tolist()))
        of_expert = [_unbound(stack, transposed=self.transposed) for stack in stacks]
        return one_by_one(rows_NC, counts, self.one, *of_expert, *(bias.unbind() for bias in biases))

    def stack(self, name: str) -> Stack:
        """Returns the matrices `[E, out, in]` of a name that this rank holds, with adapters."""
        own = held(getattr(self, name))
        matrices = own.mT if self.transposed else own
        weight: Tensor | Quantised | InFp8 = matrices
        if name in self.formats:
            weight = Quantised(own, self.formats[name])
        elif self.fp8 is not None:
            weight = cast(Fp8Matrix, self.fp8[name]).stack(matrices)
        a, b = (getattr(getattr(self, part, None), name, None) for part in ("lora_A", "lora_B"))
        return weight if a is None or b is None else Adapted(weight, held(a), held(b), self.lora_scale)


def _unbound(stack: Stack, *, transposed: bool) -> Sequence[Matrix]:
    """Returns the matrices of a stack, expert by expert, and keeps the layout of its gradient."""
    if transposed and isinstance(stack, Tensor):
        return [matrix.mT for matrix in stack.mT.unbind()]
    return unbound(stack)


def one_by_one(
    rows_NC: Tensor, counts: Sequence[int], one: Callable[..., Tensor], *of_expert: Sequence[Matrix]
) -> Tensor:
    """Runs one expert after the other, without those that have no rows. The reference of grouped
    kernels. `one`: as in `ExpertStacks`. `of_expert`: the matrices and biases, by expert, from
    unbind: its backward fills the gradient of a stack once. Each index would fill a whole one.
    Returns the results `[N, C]`."""
    experts = zip(torch.split(rows_NC, list(counts)), *of_expert, strict=True)
    out = [
        one(part_nC, *parts)
        for index, (part_nC, *parts) in enumerate(experts)
        # A rank without rows runs one expert on zero rows: its backward must take part in the
        # collectives of the other ranks.
        if len(part_nC) or (index == 0 and not len(rows_NC))
    ]
    return torch.cat(out)


class JoinedExperts(ExpertStacks):
    """E gated feed-forward blocks, gate and up in one matrix `[E, 2F, C]`; down `[E, C, F]`."""

    names = ("fused_gate_up_proj", "fused_down_proj")

    def __init__(self, count: int, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.one, self.grouped = partial(joined_block, activation), partial(grouped_joined, activation)
        for name, shape in zip(self.names, ((2 * inner, width), (width, inner)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape)))


def joined_block(activation: Callable[[Tensor], Tensor], rows_nC: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """Runs one expert: `[n, C]` to `[n, C]`."""
    gate, up = product(rows_nC, gate_up).chunk(2, dim=-1)
    return product(activation(gate) * up, down)


def grouped_joined(
    activation: Callable[[Tensor], Tensor], rows_NC: Tensor, counts_E: Tensor, gate_up: Stack, down: Stack
) -> Tensor:
    """Runs all experts with one kernel per matrix: `[N, C]` to `[N, C]`, in bf16."""
    ends = counts_E.cumsum(0).to(torch.int32)
    gate, up = grouped_product(rows_NC, gate_up, ends).chunk(2, dim=-1)
    return grouped_product(activation(gate) * up, down, ends)


class StackedExperts(ExpertStacks):
    """E gated feed-forward blocks. `names`: the family's names for the gate `[E, F, C]`, up
    `[E, F, C]` and down `[E, C, F]` matrices."""

    def __init__(self, count: int, width: int, inner: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names, self.one, self.grouped = names, swiglu, grouped
        for name, shape in zip(names, ((inner, width), (inner, width), (width, inner)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape)))


def swiglu(rows_nC: Tensor, gate_FC: Matrix, up_FC: Matrix, down_CF: Matrix) -> Tensor:
    """Runs one expert: `[n, C]` to `[n, C]`."""
    return product(F.silu(product(rows_nC, gate_FC)) * product(rows_nC, up_FC), down_CF)


def grouped(rows_NC: Tensor, counts_E: Tensor, gate_EFC: Stack, up_EFC: Stack, down_ECF: Stack) -> Tensor:
    """Runs all experts with one kernel per matrix, without synchronising with the CPU, in bf16.
    Takes rows `[N, C]` and int64 counts `[E]`, and returns results `[N, C]`."""
    ends = counts_E.cumsum(0).to(torch.int32)
    inner = F.silu(grouped_product(rows_NC, gate_EFC, ends)) * grouped_product(rows_NC, up_EFC, ends)
    return grouped_product(inner, down_ECF, ends)


ALPHA, LIMIT = 1.702, 7.0
"""Factor of the gate in its sigmoid, and the bound of gate and up."""


class ClampedExperts(ExpertStacks):
    """E gated feed-forward blocks: down((up + 1) · gate · σ(α · gate)). Parameters: gate and up
    `[E, C, 2F]` and `[E, 2F]`, down `[E, F, C]` and `[E, C]`."""

    transposed = True
    names = ("fused_gate_up_proj", "fused_down_proj")
    biases = ("fused_gate_up_proj_bias", "fused_down_proj_bias")

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.grouped = clamped_block, grouped_clamped
        for name, rows, columns in zip(self.names, (width, inner), (2 * inner, width), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(count, rows, columns)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(count, columns)))


def clamped_block(rows_nC: Tensor, gate_up: Matrix, down: Matrix, gate_up_bias: Tensor, down_bias: Tensor) -> Tensor:
    """Runs one expert: `[n, C]` to `[n, C]`."""
    return affine(clamped_swiglu(affine(rows_nC, gate_up, gate_up_bias)), down, down_bias)


def affine(rows: Tensor, matrix: Matrix, bias: Tensor) -> Tensor:
    """Multiplies rows `[n, in]` by an expert's matrix and adds its bias: `[n, out]`."""
    return linear(rows, matrix, bias) if isinstance(matrix, Tensor) else product(rows, matrix) + bias


def grouped_clamped(
    rows_NC: Tensor, counts_E: Tensor, gate_up: Stack, down: Stack, gate_up_bias: Tensor, down_bias: Tensor
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


def can_group(rows_NC: Tensor, stack: Stack) -> bool:
    """Returns whether the grouped kernel can run rows `[N, C]` and the matrices of a stack. It
    needs CUDA, bf16, at least one row, and aligned widths, those of adapters included. Where torch
    has none, that of Triton needs compute capability 8.0."""
    if isinstance(stack, Adapted):
        return all(can_group(rows_NC, matrices) for matrices in (stack.weight, stack.a, stack.b))
    return (
        rows_NC.is_cuda
        and _has_kernel(rows_NC.device)
        and rows_NC.dtype == torch.bfloat16
        and (isinstance(stack, Quantised) or stack.dtype == torch.bfloat16)
        and len(rows_NC) > 0
        and all(width % _GROUPED_ALIGNMENT == 0 for width in stack.shape[1:])
    )


def _has_kernel(device: torch.device) -> bool:
    if torch_groups(device):
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0) and fused.kernels(device) is not None


def can_fuse(rows: Tensor) -> bool:
    """Whether kernels of Triton take rows `[..., C]` to their experts and back, in one pass each.
    Their sums of a token's rows are rounded once; torch's operators round each product, too."""
    return rows.is_cuda and rows.dtype.itemsize < 8 and rows.numel() > 0 and fused.kernels(rows.device) is not None


def counted(experts_N: Tensor, experts: int) -> Tensor:
    """Counts how often each of E experts occurs in int64 `[N]`: int64 `[E]`, on the device.
    `torch.bincount` does the same, but makes the host wait for the largest number."""
    ones_N = torch.ones_like(experts_N)
    return experts_N.new_zeros(experts).scatter_add_(0, experts_N, ones_N)


def inverse(order_N: Tensor) -> Tensor:
    """Returns the inverse of a permutation, int64 `[N]`."""
    back_N = torch.empty_like(order_N)
    back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return back_N


def reordered(rows_NC: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Returns `rows_NC[order_N]`, `[N, C]`. `back_N` is the inverse of the permutation `order_N`.
    The backward reorders, too. That of an index would add to zeros, row by row, after it has sorted
    the indices."""
    result: Tensor = _Reorder.apply(rows_NC, order_N, back_N)  # type: ignore[no-untyped-call]
    return result


def repeated(x_SC: Tensor, chosen: int, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Copies every token once for each expert it chose, sorted by expert: `[S, C]` to `[N, C]`.
    `order_N`: the choice (token · K + k) that each row belongs to, a permutation. `back_N`: its
    inverse."""
    result: Tensor = _Repeat.apply(x_SC, chosen, order_N, back_N)  # type: ignore[no-untyped-call]
    return result


def combined(rows_NC: Tensor, weights_SK: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Returns each token's sum of its rows, times their weights: `[N, C]` to `[S, C]`. `order_N`,
    `back_N`: as in `repeated`, which has sorted the rows."""
    if can_fuse(rows_NC):
        result: Tensor = _Combine.apply(rows_NC, weights_SK, back_N)  # type: ignore[no-untyped-call]
        return result
    returned_SKC = reordered(rows_NC, back_N, order_N).view(*weights_SK.shape, -1)
    return (returned_SKC * weights_SK[..., None]).sum(1)


class _Reorder(torch.autograd.Function):
    """Permutes rows; the backward permutes them back."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        """Returns rows `[N, C]` in another order."""
        ctx.save_for_backward(back_N)
        return rows_NC.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient `[N, C]` in the order of the input."""
        (back_N,) = ctx.saved_tensors
        return gradient.index_select(0, back_N), None, None


class _Repeat(torch.autograd.Function):
    """Copies tokens into rows; the backward adds a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, chosen: int, order_N: Tensor, back_N: Tensor) -> Tensor:
        """Returns the rows `[N, C]` of tokens `[S, C]`."""
        ctx.save_for_backward(back_N)
        ctx.shape = len(x_SC), chosen, x_SC.shape[1]
        if can_fuse(x_SC):
            return cast(Tensor, spread_rows(x_SC, back_N.view(-1, chosen)))
        return x_SC.index_select(0, order_N.div(chosen, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient `[S, C]` of the tokens, from that of their rows `[N, C]`."""
        (back_N,) = ctx.saved_tensors
        if can_fuse(gradient):
            return summed_rows(gradient, back_N.view(ctx.shape[:2]), None), None, None, None
        return gradient.index_select(0, back_N).view(ctx.shape).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """`combined`, where kernels of Triton run."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, weights_SK: Tensor, back_N: Tensor) -> Tensor:
        """Returns the sums `[S, C]` of rows `[N, C]` with weights `[S, K]`."""
        ctx.save_for_backward(rows_NC, weights_SK, back_N)
        return cast(Tensor, summed_rows(rows_NC, back_N.view(weights_SK.shape), weights_SK))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients `[N, C]` and `[S, K]`, given that of the sums, `[S, C]`."""
        rows_NC, weights_SK, back_N = ctx.saved_tensors
        return *spread_gradient(gradient, back_N.view(weights_SK.shape), rows_NC, weights_SK), None
