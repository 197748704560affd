"""Adapters around the matrices of a stage (LoRA, arXiv:2106.09685): W·x + s · B·(A·x), W frozen.

An adapter changes neither the class nor the parameters of the module it belongs to: A and B become
children of it, and its `forward` is replaced. So names do not change, and any module works that
maps `[..., in]` to `[..., out]`. Experts' matrices are computed by `raypp.models.experts`, which
takes an `AdaptedStack` where it takes a stack.

Legend: r rank, E experts, N rows sorted by expert, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.models.quantised import QuantisedMatrix, QuantisedStack, quantise_layer, store_rest
from raypp.spec.families import family_of
from raypp.spec.lora import layer_adapters
from raypp.spec.models import DecoderOptions
from raypp.spec.quantised import quantised_base


def add_adapters(stage: nn.Module, options: DecoderOptions, layers: range) -> None:
    """Freezes a stage and adds the adapters of `model.lora` to it; does nothing without.

    The frozen matrices get the storage that `model.lora.base` asks for.

    Args:
        stage: On the meta device, neither sharded nor compiled.
        options: The `model:` section.
        layers: Global indices of the layers the stage holds.
    """
    lora = options.lora
    if lora is None:
        return
    stage.requires_grad_(False)
    if lora.base == "bf16":
        store_rest(stage, torch.bfloat16)
    base, family = quantised_base(options), family_of(options)
    for index in layers:
        layer = stage.get_submodule(f"model.layers.{index}")
        if base is not None and family is not None:
            quantise_layer(layer, family.weights(options, index), base)
        for adapter in layer_adapters(options, index):
            if adapter.stacked:
                inside, _, name = adapter.module.rpartition(".")
                _adapt_stack(layer.get_submodule(inside), name, adapter.a.shape, adapter.b.shape, lora.scale)
            else:
                _adapt(layer.get_submodule(adapter.module), lora.rank, lora.scale)


def _adapt(module: nn.Module, rank: int, scale: float) -> None:
    """Adds A `[r, in]` and B `[out, r]` to a module that maps `[..., in]` to `[..., out]`."""
    module.lora_A = nn.Linear(module.in_features, rank, bias=False)  # type: ignore[arg-type]
    module.lora_B = nn.Linear(rank, module.out_features, bias=False)  # type: ignore[arg-type]
    module.forward = partial(_adapted, module.forward, module.lora_A, module.lora_B, scale)


def _adapted(base: Callable[[Tensor], Tensor], a: nn.Module, b: nn.Module, scale: float, x: Tensor) -> Tensor:
    """Maps `[..., in]` to `[..., out]`."""
    out: Tensor = base(x) + b(a(x)) * scale
    return out


def _adapt_stack(experts: nn.Module, name: str, a: tuple[int, ...], b: tuple[int, ...], scale: float) -> None:
    """Adds A `[E, r, in]` and B `[E, out, r]` of the stack `name` to a block of experts."""
    for part, shape in (("lora_A", a), ("lora_B", b)):
        if not hasattr(experts, part):
            experts.add_module(part, nn.Module())
        experts.get_submodule(part).register_parameter(name, nn.Parameter(torch.empty(shape)))
    experts.lora_scale = scale  # type: ignore[assignment]


PlainMatrix = Tensor | QuantisedMatrix
PlainStack = Tensor | QuantisedStack


@dataclass(frozen=True)
class AdaptedMatrix:
    """The matrix of one expert and its adapter.

    Attributes:
        weight: `[out, in]`.
        a: `[r, in]`.
        b: `[out, r]`.
        scale: s.
    """

    weight: PlainMatrix
    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class AdaptedStack:
    """A stack of experts' matrices and its adapters.

    Attributes:
        weight: `[E, out, in]`.
        a: `[E, r, in]`.
        b: `[E, out, r]`.
        scale: s.
    """

    weight: PlainStack
    a: Tensor
    b: Tensor
    scale: float


Matrix = PlainMatrix | AdaptedMatrix
"""The matrix of one expert, `[out, in]`."""
Stack = PlainStack | AdaptedStack
"""The matrices of all experts, `[E, out, in]`."""


def unbound(stack: Stack) -> Sequence[Matrix]:
    """Returns the matrices of a stack, expert by expert."""
    if not isinstance(stack, AdaptedStack):
        return stack.unbind()
    weights: Sequence[PlainMatrix] = stack.weight.unbind()
    parts = zip(weights, stack.a.unbind(), stack.b.unbind(), strict=True)
    return [AdaptedMatrix(weight, a, b, stack.scale) for weight, a, b in parts]


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """Multiplies rows `[n, in]` by an expert's matrix: `[n, out]`."""
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix)
    if isinstance(matrix, QuantisedMatrix):
        return matrix.product(x)
    return product(x, matrix.weight) + F.linear(F.linear(x, matrix.a), matrix.b) * matrix.scale


def grouped_product(rows: Tensor, stack: Stack, ends_E: Tensor) -> Tensor:
    """Multiplies rows `[N, in]` by their experts' matrices in one kernel: `[N, out]`.

    Args:
        rows: Sorted by expert, in bf16.
        stack: The matrices.
        ends_E: Where each expert's rows end, int32 `[E]`.
    """
    if isinstance(stack, Tensor):
        return F.grouped_mm(rows, stack.mT, offs=ends_E)
    if isinstance(stack, QuantisedStack):
        return stack.grouped_product(rows, ends_E)
    low = F.grouped_mm(rows, stack.a.mT, offs=ends_E)
    return grouped_product(rows, stack.weight, ends_E) + F.grouped_mm(low, stack.b.mT, offs=ends_E) * stack.scale
