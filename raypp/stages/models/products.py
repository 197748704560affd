"""Matrix products with weights, and their gradients later: the W half of a split backward.

Within `weights_later` a product leaves the gradients of its weights to `LaterGradients.compute`:
the I half is a whole backward without them. It frees the graph, and recomputes activations, as any
backward; in between only each product's input and the gradient of its result are kept
(docs/design/0067). The bits are those of a whole backward. Other weights, as of norms, get their
gradients in I.

Legend: N rows, C width of the input, O width of the output, E experts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.stages.models.grouped_products import grouped_gradient, grouped_mm
from raypp.stages.models.recomputed import is_plain, product
from raypp.stages.models.tensor_ranks import WHOLE, MatrixCut, weight_here


class LaterGradients:
    """What is left of a microbatch's backward through a stage: gradients of weights."""

    def __init__(self) -> None:
        self._left: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Leaves the gradient of a weight `[...]` for later."""
        self._left.append((weight, gradient))

    def compute(self) -> None:
        """Computes the gradients, and adds each to those of its parameter. Call it once."""
        parts: list[tuple[Tensor, Tensor]] = []
        while self._left:
            weight, gradient = self._left.popleft()
            if not weight.is_leaf:  # the matrix of one expert
                parts.append((weight, gradient()))
                continue
            if weight.grad is None:
                weight.grad = gradient()
            else:
                weight.grad += gradient()
            if (told := getattr(weight, "has_gradient", None)) is not None:  # `parallel.compute_copies`
                told(weight)
        if parts:
            torch.autograd.backward([weight for weight, _ in parts], [gradient for _, gradient in parts])


_later: LaterGradients | None = None


@contextmanager
def weights_later(later: LaterGradients | None) -> Iterator[None]:
    """Surrounds a forward whose backward is split, and that backward. None: it is whole. One at a
    time in a process: a backward on a GPU computes in threads of its own."""
    global _later
    outer, _later = _later, later
    try:
        yield
    finally:
        _later = outer


def left_for_later() -> LaterGradients | None:
    """Returns what collects gradients of weights in the current forward; None: nothing does."""
    return _later


def _comes_later(weight: Tensor) -> bool:
    return _later is not None and weight.requires_grad and torch.is_grad_enabled()


class Projection(nn.Linear):
    """nn.Linear whose result a recomputation may take over, and whose weight's gradient may come
    later. `fp8`: the product in fp8 (`models.fp8`); None: that of torch. `adds_bias`: False where
    another rank of a tp group does."""

    fp8: nn.Module | None
    adds_bias = True
    rows_here: list[tuple[int, int]] | None = None
    """The rows that this rank of a tp group computes with, start and stop; None: all it has."""
    cut: MatrixCut = WHOLE
    """What products in fp8 need to know of the other ranks."""
    takes_tokens_of = 1
    """Ranks of the tp group whose tokens it takes."""
    stand_ins: tuple[Tensor, Tensor] | None
    """For the result and the input, within a compiled block (`halved`)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.fp8 = self.stand_ins = None  # not of the class: compiled code tells the two apart

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., C]` to `[..., O]`."""
        bias = weight_here(self, "bias") if self.bias is not None and self.adds_bias else None
        if self.stand_ins is not None:
            out = (self.fp8 or F.linear)(x, weight_here(self).detach(), bias)
            noted: Tensor = _Note.apply(out, x, *(one.view(*x.shape[:-1], -1) for one in self.stand_ins))  # type: ignore[no-untyped-call]
            return noted
        return linear(x, weight_here(self), bias, self.fp8 or F.linear)


class Lookup(nn.Embedding):
    """nn.Embedding whose weight's gradient may come later."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids `[...]` to rows `[..., C]` of the weight."""
        weight = weight_here(self)
        if not _comes_later(weight):
            return F.embedding(tokens, weight)
        return _apart(F.embedding(tokens, weight.detach()), tokens, weight, None, partial(_of_rows, count=len(weight)))


def defer_in(model: nn.Module) -> None:
    """Makes the linear layers of a user's own model take part."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Projection
            module.fp8 = module.stand_ins = None  # type: ignore[assignment]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
    """Returns x · Wᵀ + b, `[..., O]`, of `[..., C]`, `[O, C]` and `[O]`, as `multiply` does."""
    if torch.compiler.is_compiling() or (_later is None and is_plain()):
        return multiply(x, weight, bias)
    return product(partial(_linear, weight=weight, bias=bias, multiply=multiply), x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor]) -> Tensor:
    if not _comes_later(weight):
        return multiply(x, weight, bias)
    out = multiply(x, weight.detach(), None if bias is None else bias.detach())
    return _apart(out, x, weight, bias, partial(_of_matrix, transposed=is_transposed(weight)))


def is_transposed(weight: Tensor) -> bool:
    """Returns whether matrices `[..., O, C]` lie in memory as `[..., C, O]`."""
    return weight.stride(-1) != 1 and weight.stride(-2) == 1


def grouped_linear(rows: Tensor, stack: Tensor, ends_E: Tensor, multiply: Callable[..., Tensor] = grouped_mm) -> Tensor:
    """Multiplies rows `[N, C]`, sorted by expert, by their experts' matrices: `[N, O]`, in bf16, as
    `multiply` does. `stack`: the matrices, `[E, O, C]`."""
    return product(partial(_grouped, stack=stack, ends_E=ends_E, multiply=multiply), rows)


def _grouped(rows: Tensor, stack: Tensor, ends_E: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    if not _comes_later(stack):
        return multiply(rows, _without_rows_zero(stack, ends_E), ends_E)
    out = multiply(rows, stack.detach(), ends_E)
    return _apart(out, rows, stack, None, partial(stack_gradient, ends_E=ends_E, transposed=is_transposed(stack)))


def _apart(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Callable[..., Tensor]) -> Tensor:
    """Returns a product `[..., O]`; its backward leaves the gradients of weight and bias."""
    # Without an input that is trained, the weight makes autograd come here.
    edge = None if out.requires_grad else weight
    apart: Tensor = _Apart.apply(out, x, edge, (_later, weight, bias, gradient))  # type: ignore[no-untyped-call]
    return apart


class _Apart(torch.autograd.Function):
    """Passes a product on; its backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, edge: Tensor | None, what: tuple[Any, ...]) -> Tensor:
        """Returns `out` `[..., O]`."""
        ctx.save_for_backward(x)
        ctx.what = what
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient `[..., O]` of the product, unchanged."""
        (x,) = ctx.saved_tensors
        later, weight, bias, gradient = ctx.what
        later.add(weight, partial(gradient, x, grad))
        if bias is not None and bias.requires_grad:
            later.add(bias, partial(_of_bias, grad))
        return grad, None, None, None


# Within a compiled block no graph reaches a product from outside. Tensors without memory stand for
# each product's result and input: the compiled backward returns the gradient of the one and, as if
# it were that of the other, the input itself. So it has both to keep or to compute again. A bias
# gets its gradient in I, from the sum that the compiler makes of a whole backward, too.


def halved(block: nn.Module, forward: Callable[..., Tensor], apart: Iterable[nn.Module] = ()) -> Callable[..., Tensor]:
    """Returns a block's compiled forward, which leaves the gradients of weights for later within
    `weights_later`. `forward`: takes a tensor `[B, t, C]` first, in the dtype of all products, with
    this rank's tokens. `apart`: parts that are not compiled."""
    left_out = {part for one in apart for part in one.modules()}
    parts = [part for part in block.modules() if isinstance(part, Projection) and part not in left_out]

    def run(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        trained = [part for part in parts if _comes_later(part.weight)]
        if not trained:
            return forward(x, *arguments, **options)
        anchor = torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True)
        weights = [(weight_here(part), part.takes_tokens_of) for part in trained]
        flat = _StandIns.apply(anchor, (_later, weights), x.shape)  # type: ignore[no-untyped-call]
        for part, pair in zip(trained, zip(flat[::2], flat[1::2], strict=True), strict=True):
            part.stand_ins = pair
        try:
            return forward(x, *arguments, **options)
        finally:
            for part in trained:
                part.stand_ins = None

    return run


class _StandIns(torch.autograd.Function):
    """Makes stand-ins for the products of a block. The backward gets what they stand for."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, what: tuple[Any, list[Any]], shape: torch.Size) -> tuple[Tensor, ...]:
        """Returns `[B, T, O]` and `[B, T, C]` per product. `shape`: this rank's `[B, t, C]`."""
        later, weights = what
        ctx.set_materialize_grads(False)
        ctx.what = later, [weight for weight, _ in weights]
        one, (rows, tokens, _) = anchor.new_zeros(1), shape
        return tuple(one.expand(rows, tokens * ranks, width) for weight, ranks in weights for width in weight.shape)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[None, None, None]:
        """Takes the gradient of each result `[B, T, O]` and the input `[B, T, C]`."""
        later, weights = ctx.what
        for weight, grad, x in zip(weights, given[::2], given[1::2], strict=True):
            if grad is not None and x is not None:
                later.add(weight, partial(_of_matrix, x, grad, transposed=is_transposed(weight)))
        return None, None, None


class _Note(torch.autograd.Function):
    """Passes a product on; its backward hands its input and its gradient to the stand-ins."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, _of_result: Tensor, _of_input: Tensor) -> Tensor:
        """Returns `out` `[..., O]`."""
        ctx.save_for_backward(x)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        """Returns the gradient `[..., O]` of the product, unchanged, and what stand-ins get."""
        (x,) = ctx.saved_tensors
        return grad, None, grad, x


# The gradients, by the operators that torch's own backwards use.


@torch.no_grad()
def _of_matrix(x: Tensor, grad: Tensor, *, transposed: bool) -> Tensor:
    """Returns the gradient `[O, C]`, of inputs `[..., C]` and gradients `[..., O]`."""
    x_NC, grad_NO = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (x_NC.t() @ grad_NO).t() if transposed else grad_NO.t() @ x_NC


@torch.no_grad()
def _of_bias(grad: Tensor) -> Tensor:
    """Returns the gradient `[O]`, of gradients `[..., O]`."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


@torch.no_grad()
def _of_rows(tokens: Tensor, grad: Tensor, *, count: int) -> Tensor:
    """Returns the gradient `[count, C]`, of ids `[...]` and gradients `[..., C]`."""
    return torch.ops.aten.embedding_dense_backward(grad, tokens, count, -1, False)  # type: ignore[no-any-return]


@torch.no_grad()
def stack_gradient(rows: Tensor, grad: Tensor, *, ends_E: Tensor, transposed: bool) -> Tensor:
    """Returns the gradient `[E, O, C]`, of rows `[N, C]` and gradients `[N, O]`."""
    grad = grad.contiguous()
    one, other = (rows, grad) if transposed else (grad, rows)
    product_EOC = grouped_gradient(one, other, ends_E)
    gradient = product_EOC.mT if transposed else product_EOC
    return _rows_zero(gradient, ends_E) if _leaves_rows(gradient) else gradient


def _without_rows_zero(stack: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the matrices `[E, out, in]`; gradients of those of experts without rows will be zero.
    On cards of compute capability 10 torch's kernel is reported to leave other values there
    (pytorch issue 172439); a Hopper's, and the kernel of Triton, write zeros."""
    if not stack.requires_grad or not _leaves_rows(stack):
        return stack
    result: Tensor = _GradientOfRows.apply(stack, ends_E)  # type: ignore[no-untyped-call]
    return result


class _GradientOfRows(torch.autograd.Function):
    """Passes matrices on; the backward sets the gradients of experts without rows to zero."""

    @staticmethod
    def forward(ctx: Any, stack_Eoi: Tensor, ends_E: Tensor) -> Tensor:
        """Returns the matrices `[E, out, in]`."""
        ctx.save_for_backward(ends_E)
        return stack_Eoi.view_as(stack_Eoi)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient `[E, out, in]`, in new memory."""
        (ends_E,) = ctx.saved_tensors
        return _rows_zero(gradient, ends_E), None


def _leaves_rows(stack: Tensor) -> bool:
    return stack.is_cuda and torch.cuda.get_device_capability(stack.device)[0] == 10


def _rows_zero(gradient: Tensor, ends_E: Tensor) -> Tensor:
    """Returns a gradient `[E, out, in]` that is zero for experts without rows."""
    rows_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    return gradient.masked_fill((rows_E == 0)[:, None, None], 0)
