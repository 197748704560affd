"""Copies of fp32 weights in the dtype that a stage computes in, where no rank shares the weights;
gradients that are wider than weights.

Optimizer, checkpoints and sums see the weights. While the stage computes, the copies are in their
place, and collect the gradients. Where weights are sharded, FSDP does the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raypp.stages.models.fp8 import kept_matrices
from raypp.stages.models.stage import tied_within
from raypp.torch_private import foreach_copy_, sum_shards_in


class ComputeCopies:
    """The copies of one stage. They take memory from the start.

    Args:
        stage: A stage whose weights are allocated. It knows its copies from now on (`computing`).
        sums: The dtype in which gradients are summed over microbatches.
        as_they_are: Weights that products take as they are.

    Attributes:
        of: The copy of each weight.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype, sums: torch.dtype, as_they_are: set[nn.Parameter]) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self._places = [
            (module, name, weight)
            for module in stage.modules()
            for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
            if weight.is_floating_point() and weight.dtype != dtype and weight not in as_they_are
        ]
        tied = tied_within(stage)
        for weight in dict.fromkeys(weight for _, _, weight in self._places):  # a shared one has several places
            copy = self.of[weight] = nn.Parameter(torch.empty_like(weight, dtype=dtype), weight.requires_grad)
            if weight is tied:
                copy.grad_dtype = sums
            elif weight.requires_grad and sums == weight.dtype:
                move = partial(_move_gradient, weight)
                copy.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
                copy.has_gradient = move  # type: ignore[attr-defined]
        stage.compute_copies = self  # type: ignore[assignment]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the copies, with the values of the weights, into the stage for a block's duration.
        Afterwards the weights have the gradients, in their own dtype."""
        if self.of:
            with torch.no_grad():
                foreach_copy_(list(self.of.values()), list(self.of))
        self._put(self.of)
        try:
            yield
        finally:
            self._put({weight: weight for weight in self.of})
        self.move_gradients()

    def move_gradients(self) -> None:
        """Adds gradients that copies have to those of the weights, where a backward does not."""
        for weight, copy in self.of.items():
            _move_gradient(weight, copy)

    def _put(self, shown: dict[nn.Parameter, nn.Parameter]) -> None:
        for module, name, weight in self._places:
            setattr(module, name, shown[weight])


@torch.no_grad()
def _move_gradient(weight: nn.Parameter, copy: nn.Parameter) -> None:
    """Adds the gradient `[...]` of a copy to that of its weight. One pass, and no wider copy."""
    if copy.grad is not None:
        weight.grad = copy.grad.to(weight.dtype) if weight.grad is None else weight.grad.add_(copy.grad)
        copy.grad = None


def copies_of(stage: nn.Module) -> ComputeCopies | None:
    """Returns the copies of a stage; None if it has none."""
    return getattr(stage, "compute_copies", None)


@contextmanager
def computing(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Lets stages compute, forwards and backwards, for a block's duration; see `in_place`. Stages
    without copies always can. What they keep in fp8 is made again."""
    with ExitStack() as stack:
        for stage in stages:
            for matrix in kept_matrices(stage):
                matrix.due = True
            if (copies := copies_of(stage)) is not None:
                stack.enter_context(copies.in_place())
        yield


# Gradients of bf16 weights that are summed over microbatches in fp32.
#
# Where FSDP manages a stage, it does that itself (`MixedPrecisionPolicy.reduce_dtype`; after
# separate backwards of weights, `torch_private.add_to_sums`), and rounds the sum over all ranks to
# bf16. If every backward sums over ranks, it would round each of these sums, unless a parameter
# says so. Elsewhere torch's autograd does it, if a parameter says so.
#
# A few parameters are in fp32 beside bf16 weights (`Weight.fp32`). FSDP gives all that it reduces
# together one dtype: their sums are rounded to bf16, too.


def sum_in(stage: nn.Module, dtype: torch.dtype) -> None:
    """Gives the gradients of a stage's parameters this dtype. Not fp32 for stages that FSDP manages
    and reduces once a step."""
    for parameter in stage.parameters():
        if parameter.dtype != dtype and parameter.requires_grad:
            parameter.grad_dtype = dtype
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            sum_shards_in(module, dtype)


def fill_wide_gradients(stages: Iterable[nn.Module]) -> None:
    """Sets gradients that are wider than their parameter, and not there yet, to zero. Called before
    the backwards of a step: a backward that computes weight gradients separately adds to the
    gradient that is there, and would create it in the parameter's dtype. FSDP creates its own, and
    with replicas keeps the sums elsewhere until the last backward."""
    for stage in (one for one in stages if not isinstance(one, FSDPModule)):
        for parameter in stage.parameters():
            wide = parameter.requires_grad and parameter.grad_dtype not in (None, parameter.dtype)
            if wide and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def round_gradient(parameter: Tensor) -> None:
    """Rounds the wide gradient of a parameter `[...]` to the parameter's dtype, in place. Call it
    once the sum is complete: then it is FSDP's gradient, but for the sum's order."""
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != parameter.dtype:
        gradient.copy_(gradient.to(parameter.dtype))
