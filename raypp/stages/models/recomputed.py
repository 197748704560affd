"""Blocks whose backward computes their activations again, and what a recomputation takes over.

A recomputed block keeps its arguments. The first tensor that its backward needs runs its forward
again, up to the last tensor that autograd saved of it. Saved-tensor hooks do this, so no operator
passes through Python (docs/design/0067). Two kinds of results are taken over from the forward:

- those of matrix products and attention, if they were kept (`product`, `attention`);
- what is not arithmetic (`once`): reading a size from the device makes the host wait for it, and
  asking the other ranks for theirs is a collective.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class _Current(threading.local):
    """What the running code belongs to, by thread: a backward recomputes in threads of its own."""

    part: _Forward | _Again | None = None


_current = _Current()


@contextmanager
def _running(part: _Forward | _Again) -> Iterator[None]:
    outer, _current.part = _current.part, part
    try:
        yield
    finally:
        _current.part = outer


def once(compute: Callable[[], T]) -> T:
    """Returns `compute()`; in a recomputation, what it returned in the forward. Both must call
    `once` in the same order. Without recomputation it only calls `compute`."""
    part = _current.part
    return compute() if part is None else part.once(compute)


def is_plain() -> bool:
    """Whether `product` only computes: no block that is recomputed runs."""
    return _current.part is None


def product(compute: Callable[..., T], *inputs: Tensor) -> T:
    """Returns `compute(*inputs)`, a tensor or several; in a recomputation, what was kept of it. Its
    backward may need the inputs, weights, results, and what is small."""
    part = _current.part
    if part is None or not torch.is_grad_enabled():
        return compute(*inputs)
    return cast(T, part.product(compute, inputs))


def attention(compute: Callable[..., T], *inputs: Tensor) -> T:
    """As `product`; but if nothing is kept, its results are recomputed for its own backward."""
    part = _current.part
    return compute(*inputs) if part is None or not part.keeps else product(compute, *inputs)


def recomputed(forward: Callable[..., Any], *, keeps: bool = False, offloads: bool = False) -> Callable[..., Any]:
    """Returns a forward that keeps only its arguments for the backward. It may draw no numbers.
    `forward`: of a block. `keeps`: whether results of `product` and `attention` are kept, too.
    `offloads`: whether hooks take its arguments (`pipeline.activation_offload`)."""
    return partial(_run, forward, keeps, offloads)


def _run(forward: Callable[..., Any], keeps: bool, offloads: bool, *arguments: Any, **options: Any) -> Any:
    forward = partial(forward, **options) if options else forward
    if not torch.is_grad_enabled():
        return forward(*arguments)
    part = _Forward(forward, arguments, keeps, offloads)
    with _running(part), saved_tensors_hooks(part.pack, part.unpack):
        return forward(*arguments)


_ELSEWHERE = object()
"""Stands for an argument that hooks around the block have taken."""


class _Saved:
    """A tensor that autograd saved, once it is recomputed; freed with the node that needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Saves(torch.autograd.Function):
    """A node that saves tensors so that the hooks around see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Returns `[0]`, whose node has the tensors."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Result(torch.autograd.Function):
    """A result that requires a gradient. A leaf would stay as long as what is computed of it."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, result: Tensor) -> Tensor:
        """Returns the result `[...]`."""
        return result.detach()


class _Forward:
    """A forward, and what its recomputation needs of it. `saved`: what autograd saved, in order:
    itself while it is alive, its shape, and, if it is or views an input of a product: which
    product, which input, and the view. `kept`: of each product: the results, if they are kept, and
    which require a gradient. `results`: those of `once`."""

    def __init__(self, forward: Callable[..., Any], arguments: tuple[Any, ...], keeps: bool, offloads: bool) -> None:
        self.forward, self.keeps = forward, keeps
        self.trained = [isinstance(one, Tensor) and one.requires_grad for one in arguments]
        self.arguments = [one.detach() if isinstance(one, Tensor) else one for one in arguments]
        self.held: Tensor | None = None
        if offloads:
            tensors = [one for one in self.arguments if isinstance(one, Tensor)]
            self.arguments = [_ELSEWHERE if isinstance(one, Tensor) else one for one in self.arguments]
            # The result, not its node: that of torch 2.11 does not keep what is saved alone.
            self.held = _Saves.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        self.saved: list[tuple[weakref.ref[_Saved], torch.Size, tuple[int, int, Any] | None]] = []
        self.kept: list[tuple[list[Tensor] | None, list[bool]]] = []
        self.results: list[Any] = []
        self._inputs: list[tuple[Tensor, Any]] | None = None

    def once(self, compute: Callable[[], T]) -> T:
        self.results.append(compute())
        return cast(T, self.results[-1])

    def product(self, compute: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        if self._inputs is not None:  # a part of another product
            return compute(*inputs)
        self._inputs = [(one, one.untyped_storage()) for one in inputs]
        result = compute(*inputs)
        self._inputs = None
        several = result if isinstance(result, tuple) else (result,)
        kept = [one.detach() for one in several] if self.keeps else None
        self.kept.append((kept, [one.requires_grad for one in several]))
        return result

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Takes a tensor `[...]` that the forward saves; returns what autograd holds instead."""
        place = None
        if self._inputs is not None:
            storage = tensor.untyped_storage()
            found = [index for index, (_, own) in enumerate(self._inputs) if own is storage]
            if not found:  # a weight, a result, or small
                return tensor.detach()
            one, _ = self._inputs[found[0]]
            distance = tensor.storage_offset() - one.storage_offset()  # inputs may share a storage
            same = tensor.shape == one.shape and tensor.stride() == one.stride() and not distance
            view = None if same else (tensor.shape, tensor.stride(), distance)
            place = len(self.kept), found[0], view
        saved = _Saved()
        self.saved.append((weakref.ref(saved), tensor.shape, place))
        return saved

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """Returns a saved tensor `[...]` to a backward."""
        if isinstance(saved, Tensor):
            return saved
        if saved.tensor is None:
            _Again(self).run()
            assert saved.tensor is not None
        return saved.tensor

    def leaves(self) -> list[Any]:
        """Returns the arguments for the recomputation."""
        node: Any = None if self.held is None else self.held.grad_fn
        tensors = iter(() if node is None else node.saved_tensors)
        pairs = zip(self.arguments, self.trained, strict=True)
        held = ((next(tensors, None) if one is _ELSEWHERE else one, trained) for one, trained in pairs)
        return [cast(Tensor, one).detach().requires_grad_() if trained else one for one, trained in held]


class _AllThere(Exception):
    """Everything is recomputed that autograd saved."""


class _Again:
    """A recomputation: it takes results over, and supplies what autograd saved."""

    def __init__(self, first: _Forward) -> None:
        self._first, self.keeps = first, first.keeps
        self._next = self._products = self._taken = 0
        self._anchor = torch.empty(0, requires_grad=True)

    def run(self) -> None:
        try:
            with _running(self), torch.enable_grad(), saved_tensors_hooks(self._pack, _refuse):
                self._first.forward(*self._first.leaves())
        except _AllThere:
            return
        _refuse()

    def _pack(self, tensor: Tensor) -> None:
        saved, shape, _ = self._first.saved[self._next]
        if tensor.shape != shape:
            _refuse()
        if (one := saved()) is not None:
            one.tensor = tensor.detach()
        self._next += 1
        if self._next == len(self._first.saved):
            raise _AllThere

    def once(self, _: Callable[[], T]) -> T:
        self._taken += 1
        return cast(T, self._first.results[self._taken - 1])

    def product(self, compute: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        number = self._products
        while (place := self._first.saved[self._next][2]) is not None and place[0] == number:
            one = inputs[place[1]]
            if place[2] is not None:
                shape, stride, distance = place[2]
                one = one.detach().as_strided(shape, stride, one.storage_offset() + distance)
            self._pack(one)
        self._products += 1
        results, trained = self._first.kept[number]
        if results is None:
            with torch.no_grad():
                computed = compute(*inputs)
            results = list(computed) if isinstance(computed, tuple) else [computed]
        self._first.kept[number] = None, trained  # free, unless it is saved again
        assert results is not None
        several = tuple(
            _Result.apply(self._anchor, one) if trains else one.detach()  # type: ignore[no-untyped-call]
            for one, trains in zip(results, trained, strict=True)
        )
        return several if len(several) > 1 else several[0]


def _refuse(_: None = None) -> NoReturn:
    raise RuntimeError("a recomputed forward did not do the same as the first one, in the same order")
