"""Linear layers and stacks of experts with a frozen, quantised matrix (QLoRA, arXiv:2305.14314).

A forward and a backward each dequantise the matrix for their product and drop it. The backward
gives the gradient of the input only. The bytes are a parameter that never requires a gradient, with
the global name of the matrix; so FSDP shards and gathers them like any weight, and expert
parallelism cuts them like any stack.

Both products are operators of torch: the compiler does not look inside, so their bits do not depend
on `train.compile`. Selective recomputation does not keep their results, and plans count on that.
Matrices in fp8 are not dequantised, but for stacks of experts without `train.fp8.experts`: see
`raypp.stages.models.fp8`.

Legend: N rows of activations, C width of the input, O width of the output, E experts, F inner width
of an expert, R bytes of a quantised row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.family import Weight
from raypp.job.lora import Base, is_quantised, row_bytes
from raypp.job.precision import FP32, Dtype
from raypp.stages.models.fp8 import frozen_product, fused_rows, rows_in_fp8
from raypp.stages.models.grouped_products import grouped_mm
from raypp.stages.models.quantised_rows import dequantise_rows, fp8_parts, quantise_rows
from raypp.stages.models.tensor_ranks import WHOLE, MatrixCut, weight_here


@dataclass(frozen=True)
class Format:
    """How a matrix, or a stack of them, is stored.

    Attributes:
        base: int8, nf4 or fp8.
        width: Weights in a row.
        transposed: The rows are those of the transposed matrix: C rows of O weights.
        cast: Rounds rows for products in fp8, as `rows_in_fp8` does. None: products are of the
            dequantised matrix.
    """

    base: Base
    width: int
    transposed: bool = False
    cast: Callable[..., tuple[Tensor, Tensor]] | None = None

    def shape(self, stored: Sequence[int]) -> torch.Size:
        """Returns the shape `[..., O, C]` of the weights whose bytes have shape `[..., O, R]`."""
        return torch.Size((*stored[:-1], self.width))

    def quantise(self, weights: Tensor) -> Tensor:
        """Returns the bytes `[..., O, R]` of weights `[..., O, C]`, or of some of their rows.
        Raises ValueError: a weight is not finite."""
        return quantise_rows(weights, self.base)

    def dequantise(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights `[..., O, C]` of bytes `[..., O, R]`."""
        return dequantise_rows(stored, self.base, self.width, dtype)

    def empty(self, shape: Sequence[int]) -> nn.Parameter:
        """Allocates the bytes of weights of this shape, `[..., O, C]`, on the meta device."""
        stored = (*shape[:-1], row_bytes(self.base, self.width))
        return nn.Parameter(torch.empty(stored, dtype=torch.uint8, device="meta"), requires_grad=False)

    def product(
        self, x: Tensor, stored: Tensor, ends: Tensor | None = None, first: int = 0, cut: MatrixCut = WHOLE
    ) -> Tensor:
        """Multiplies `[..., C]` by the matrix whose bytes are given: `[..., O]`; see `_product`."""
        if self.cast is not None:
            rows, scales = fp8_parts(stored.to(torch.uint8), self.width)
            return frozen_product(x, rows[..., first : first + x.shape[-1]], scales, ends, self.cast, cut)
        return cast(Tensor, _product(x, stored, ends, self.base, self.width, self.transposed, first))


@torch.library.custom_op("raypp::quantised_product", mutates_args=())
def _product(
    x: Tensor, stored: Tensor, ends: Tensor | None, base: str, width: int, transposed: bool, first: int
) -> Tensor:
    """Returns x · Wᵀ, `[..., O]`, of x `[..., C]`; with ends `[E]`, of rows sorted by expert. The
    bytes are those of W, `[O, R]`, or of Wᵀ, `[C, R]`; of experts, `[E, O, R]` or `[E, C, R]`.
    `first`: the column of W that the first of x is multiplied by, if x has fewer than W."""
    matrix = _dequantised(stored, base, width, transposed, x.dtype)[..., first : first + x.shape[-1]]
    return F.linear(x, matrix) if ends is None else grouped_mm(x, matrix, ends)


@_product.register_fake
def _(x: Tensor, stored: Tensor, ends: Tensor | None, base: str, width: int, transposed: bool, first: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width if transposed else stored.shape[-2])


def _dequantised(stored: Tensor, base: str, width: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Returns W, `[..., O, C]`, of its bytes `[..., O, R]`, or of those of Wᵀ, `[..., C, R]`."""
    rows = dequantise_rows(stored, cast(Base, base), width, dtype)
    return rows.mT if transposed else rows


@torch.library.custom_op("raypp::quantised_product_backward", mutates_args=())
def _product_backward(
    gradient: Tensor,
    stored: Tensor,
    ends: Tensor | None,
    base: str,
    width: int,
    transposed: bool,
    first: int,
    count: int,
) -> Tensor:
    """Returns gradient · W, `[..., C]`, of the gradient `[..., O]`. The bytes and ends are as for
    `_product`, `count` are the columns of x."""
    matrix = _dequantised(stored, base, width, transposed, gradient.dtype)[..., first : first + count]
    # An expanded gradient (of a sum) has strides that the grouped kernel refuses.
    return gradient @ matrix if ends is None else grouped_mm(gradient.contiguous(), matrix.mT, ends)


@_product_backward.register_fake
def _(
    gradient: Tensor,
    stored: Tensor,
    ends: Tensor | None,
    base: str,
    width: int,
    transposed: bool,
    first: int,
    count: int,
) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], count)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, str, int, bool, int], output: Tensor) -> None:
    """Keeps the bytes, `[..., O, R]` or `[..., C, R]`, and the ends, `[E]`, for the backward."""
    x, stored, ends, ctx.base, ctx.width, ctx.transposed, ctx.first = inputs
    ctx.count = x.shape[-1]
    ctx.save_for_backward(stored, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
    """Returns the gradient `[..., C]` of the input, given that of the output, `[..., O]`."""
    stored, ends = ctx.saved_tensors
    how = ctx.base, ctx.width, ctx.transposed, ctx.first, ctx.count
    return _product_backward(gradient, stored, ends, *how), None, None, None, None, None, None


_product.register_autograd(_backward, setup_context=_keep)


@dataclass(frozen=True)
class Quantised:
    """The matrix of one expert, or the same matrix of all experts that a rank holds. `stored`: the
    bytes, uint8 `[O, R]` or `[E, O, R]`."""

    stored: Tensor
    format: Format

    @property
    def shape(self) -> torch.Size:
        return self.format.shape(self.stored.shape)

    def unbind(self) -> list[Quantised]:
        """Returns the experts, one by one."""
        return [Quantised(matrix, self.format) for matrix in self.stored.unbind()]

    def product(self, rows: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Multiplies rows `[N, C]` by the matrix, or by those of their experts in one kernel. The
        kernel needs what `grouped_mm` needs. All matrices are dequantised for it at once. `rows`:
        `[N, C]`; sorted by expert, if there are several. `ends_E`: where each expert's rows end,
        int32 `[E]`; None: it is the matrix of one. Returns `[N, O]`."""
        return self.format.product(rows, self.stored, ends_E)


class QuantisedLinear(nn.Module):
    """A linear layer with a frozen quantised matrix. It is built on the meta device. Its bytes come
    from `Format.quantise`. `bias`: it has a bias, which is frozen, but not quantised. Of a tp
    group, `columns` are this rank's, and one rank `adds_bias`."""

    def __init__(self, in_features: int, out_features: int, base: Base, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format = Format(base, in_features, cast=rows_in_fp8 if base == "fp8" else None)
        self.formats = {"weight": self.format}
        self.columns: range | None = None
        self.cut = WHOLE
        self.rows_here: list[tuple[int, int]] | None = None
        self.adds_bias = True
        self.weight = self.format.empty((out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., C]` to `[..., O]`, in the dtype of the input."""
        first = 0 if self.columns is None else self.columns.start
        out = self.format.product(x, weight_here(self), first=first, cut=self.cut)
        return out if self.bias is None or not self.adds_bias else out + weight_here(self, "bias")


def stored_formats(module: nn.Module) -> Iterator[tuple[str, Format]]:
    """Yields name and format of every parameter that holds quantised weights."""
    for prefix, part in module.named_modules():
        for name, form in getattr(part, "formats", {}).items():
            yield f"{prefix}.{name}" if prefix else name, form


def multiply_experts_in_fp8(stage: nn.Module, *, fused: bool) -> None:
    """Lets products take stacks of experts in fp8 as they are, but transposed ones. `fused`: a
    compiled function rounds the rows of activations."""
    cast = fused_rows() if fused else rows_in_fp8
    for part in stage.modules():
        if (formats := getattr(part, "formats", None)) and not isinstance(part, QuantisedLinear):
            part.formats = {
                name: form if form.transposed else replace(form, cast=cast) for name, form in formats.items()
            }  # type: ignore[assignment]


def quantise_layer(layer: nn.Module, weights: Iterable[Weight], base: Base) -> None:
    """Replaces the matrices of a layer by quantised ones, without values. `layer`: on the meta
    device, neither sharded nor compiled."""
    for weight in filter(is_quantised, weights):
        inside, _, name = weight.name.removesuffix(".weight").rpartition(".")
        parent = layer.get_submodule(inside)
        module = getattr(parent, name)
        if isinstance(module, nn.Linear):
            quantised = QuantisedLinear(module.in_features, module.out_features, base, bias=module.bias is not None)
            setattr(parent, name, quantised)
        else:
            form = Format(base, weight.shape[-1], weight.transposed)
            setattr(parent, name, form.empty(weight.shape))
            parent.formats = {**getattr(parent, "formats", {}), name: form}  # type: ignore[assignment]


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Returns the dtype of a job in torch; fp32 is torch's default dtype. Tests set that default to
    fp64, where rounding cannot hide a wrong sum."""
    of_torch: torch.dtype = torch.get_default_dtype() if dtype is FP32 else getattr(torch, dtype.torch)
    return of_torch


def store_rest(stage: nn.Module, dtype: torch.dtype) -> None:
    """Gives the frozen weights of a stage that are not quantised (embeddings, norms) a dtype. The
    stage is on the meta device."""
    for parameter in stage.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
