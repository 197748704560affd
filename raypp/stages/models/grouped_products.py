"""Products of rows with the matrices of their experts, and rows' ways there and back, in one kernel
each: torch's, or one of Triton.

torch's kernel is for compute capability 9.0 and 10.x. On other cards its operator reads the groups
on the host and loops over them, so there a kernel of Triton takes its place.

Legend: N rows sorted by expert, I columns of a row, O of a result, E experts. S tokens with K
experts each, N = S · K; C columns of a token.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from raypp.stages.models import fused

OPERATOR = "raypp::grouped_product"
"""The operator of the kernel of Triton, as selective checkpointing sees it."""


def held(parameter: Tensor) -> Tensor:
    """Returns the part of a parameter `[...]` that this rank computes with: of experts under ep,
    of matrices under tp, else all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def torch_groups(device: torch.device) -> bool:
    """Returns whether torch has a kernel for a CUDA device."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def grouped_mm(rows_NI: Tensor, stack_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows `[N, I]` by the transposed matrices `[E, O, I]` of their experts: `[N, O]`.
    `rows_NI`: sorted by expert, in bf16; on CUDA."""
    if rows_NI.is_cuda and not torch_groups(rows_NI.device):
        return cast(Tensor, _product(rows_NI, stack_EOI, ends_E))
    return F.grouped_mm(rows_NI, stack_EOI.mT, offs=ends_E)


def grouped_gradient(gradient_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the gradient `[E, O, I]` of the matrices of `grouped_mm`, without a graph."""
    if rows_NI.is_cuda and not torch_groups(rows_NI.device):
        return cast(Tensor, _of_matrices(gradient_NO, rows_NI, ends_E))
    return F.grouped_mm(gradient_NO.t(), rows_NI, offs=ends_E)


def _kernels(device: torch.device) -> Any:
    from raypp.stages.models import triton_kernels  # imported here: a CPU has no triton

    assert device.type == "cpu" or fused.kernels(device) is not None, "`experts` asks first"
    return triton_kernels


@torch.library.custom_op(OPERATOR, mutates_args=())
def _product(rows_NI: Tensor, stack_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns `[N, O]` of rows `[N, I]`, matrices `[E, O, I]` and ends `[E]`."""
    return cast(Tensor, _kernels(rows_NI.device).by_expert(rows_NI, stack_EOI, ends_E))


@_product.register_fake
def _(rows_NI: Tensor, stack_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return rows_NI.new_empty(len(rows_NI), stack_EOI.shape[1])


@torch.library.custom_op(f"{OPERATOR}_of_matrices", mutates_args=())
def _of_matrices(gradient_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the gradient `[E, O, I]` of the matrices."""
    return cast(Tensor, _kernels(rows_NI.device).of_matrices(gradient_NO, rows_NI, ends_E))


@_of_matrices.register_fake
def _(gradient_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    return rows_NI.new_empty(len(ends_E), gradient_NO.shape[1], rows_NI.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Keeps rows `[N, I]`, matrices `[E, O, I]` and ends `[E]` for the backward."""
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Returns the gradients of rows and matrices, given that of the result, `[N, O]`."""
    rows, stack, ends = ctx.saved_tensors
    of_rows = _product(gradient, stack.mT, ends) if ctx.needs_input_grad[0] else None
    return of_rows, _of_matrices(gradient, rows, ends) if ctx.needs_input_grad[1] else None, None


_product.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("raypp::spread_rows", mutates_args=())
def spread_rows(x_SC: Tensor, places_SK: Tensor) -> Tensor:
    """Returns the rows `[N, C]` in which every token is once for each place, int64 `[S, K]`."""
    return cast(Tensor, _kernels(x_SC.device).spread(x_SC, places_SK)[0])


@spread_rows.register_fake
def _(x_SC: Tensor, places_SK: Tensor) -> Tensor:
    return x_SC.new_empty(places_SK.numel(), x_SC.shape[1])


@torch.library.custom_op("raypp::spread_gradient", mutates_args=())
def spread_gradient(
    gradient_SC: Tensor, places_SK: Tensor, rows_NC: Tensor, weights_SK: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows and weights of `summed_rows`, given that of its result."""
    return cast(tuple[Tensor, Tensor], _kernels(rows_NC.device).spread(gradient_SC, places_SK, rows_NC, weights_SK))


@spread_gradient.register_fake
def _(gradient_SC: Tensor, places_SK: Tensor, rows_NC: Tensor, weights_SK: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_NC), torch.empty_like(weights_SK)


@torch.library.custom_op("raypp::summed_rows", mutates_args=())
def summed_rows(rows_NC: Tensor, places_SK: Tensor, weights_SK: Tensor | None) -> Tensor:
    """Returns each token's sum `[S, C]` of its rows, weighted or not, in the order of its places.
    Sums are in fp32, and rounded once."""
    return cast(Tensor, _kernels(rows_NC.device).summed(rows_NC, places_SK, weights_SK))


@summed_rows.register_fake
def _(rows_NC: Tensor, places_SK: Tensor, weights_SK: Tensor | None) -> Tensor:
    return rows_NC.new_empty(len(places_SK), rows_NC.shape[1])
