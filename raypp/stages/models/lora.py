"""Adapters around the matrices of a stage (LoRA, arXiv:2106.09685): W·x + s · B·(A·x), W frozen.

An adapter does not change the parameters of the module it belongs to: A and B become children of
it, and its class gets another `forward`. So names do not change, and any module works that maps
`[..., in]` to `[..., out]`. Experts' matrices are computed by `raypp.stages.models.experts`, which
takes an `Adapted` where it takes a stack.

Legend: r rank, E experts, N rows sorted by expert, n rows of one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raypp.job.known_families import family_of
from raypp.job.lora import also_trained, layer_adapters, quantised_base
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.job.precision import DTYPES
from raypp.stages.models.adapter_dropout import AdapterDropout, CurrentTokens
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fp8 import InFp8
from raypp.stages.models.products import Projection, grouped_linear, linear
from raypp.stages.models.quantised import Quantised, quantise_layer, store_rest, torch_dtype


def add_adapters(stage: nn.Module, options: DecoderOptions, layers: range) -> None:
    """Freezes a stage, but for what `also_train` names, and adds the adapters of `model.lora` to
    it; does nothing without.

    The frozen matrices get the storage that `model.lora.base` asks for. `stage`: on the meta
    device, neither sharded nor compiled. `layers`: global indices of the layers the stage holds.
    """
    lora = options.lora
    if lora is None:
        return
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in also_trained(options))
    if lora.base in DTYPES:
        store_rest(stage, torch_dtype(DTYPES[lora.base]))
    base, family = quantised_base(options), family_of(options)
    for index in layers:
        layer = stage.get_submodule(f"model.layers.{index}")
        if base is not None and family is not None:
            quantise_layer(layer, family.weights(options, index), base)
        adapters = layer_adapters(options, index)
        tokens = _tell_tokens(layer) if lora.dropout and adapters else None
        for adapter in adapters:
            if adapter.stacked:
                inside, _, name = adapter.module.rpartition(".")
                _adapt_stack(layer.get_submodule(inside), name, adapter.a.shape, adapter.b.shape, lora.scale)
            else:
                name = f"model.layers.{index}.{adapter.module}"
                dropout = None if tokens is None else AdapterDropout(lora.dropout, name, tokens)
                _adapt(layer.get_submodule(adapter.module), lora, dropout)


class _Adapted(nn.Module):
    """Adds the adapter to what the class behind it maps `[..., in]` to `[..., out]`."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scale: float
    lora_dropout: AdapterDropout | None

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`."""
        # The base first: its node of the graph then has its place among those that add to the
        # gradient of x, with dropout and without, and sums have the same order.
        base: Tensor = super().forward(x)
        taken = x if self.lora_dropout is None else self.lora_dropout(x)
        out: Tensor = base + self.lora_B(self.lora_A(taken)) * self.lora_scale
        return out


class _Telling(nn.Module):
    """Tells the adapters within which tokens they get, before the class behind it computes. Both a
    layer and its attention do so: each may be what is recomputed in a backward."""

    lora_tokens: CurrentTokens

    def forward(self, x_BTC: Tensor, rotary: Any, documents: PackedDocuments, *rest: Any) -> Tensor:
        """Maps `[B, T, C]` to `[B, T, C]`."""
        self.lora_tokens.keys_S = documents.keys_S
        out: Tensor = super().forward(x_BTC, rotary, documents, *rest)
        return out


def extend(module: nn.Module, mixin: Any) -> None:
    """Gives a module the `forward` of a class, which calls that of the module's own class."""
    kind: Any = type(module)
    module.__class__ = _joined(mixin, kind)


@cache
def _joined(mixin: type[Any], kind: type[Any]) -> type[Any]:
    """Returns the class of modules of a kind that have another `forward`. One class for all modules
    of a kind: a `forward` of each module's own would make `torch.compile` compile every layer
    again, and none after the eighth."""
    return type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), {})


def _tell_tokens(layer: nn.Module) -> CurrentTokens:
    """Makes a layer tell what adapters within it get, and returns where."""
    tokens = CurrentTokens()
    for module in (layer, layer.get_submodule(str(layer.mixer_name))):
        module.lora_tokens = tokens  # type: ignore[assignment]
        extend(module, _Telling)
    return tokens


def _adapt(module: nn.Module, lora: LoraOptions, dropout: AdapterDropout | None) -> None:
    """Adds A `[r, in]` and B `[out, r]` to a module that maps `[..., in]` to `[..., out]`."""
    module.lora_A = Projection(module.in_features, lora.rank, bias=False)  # type: ignore[arg-type]
    module.lora_B = Projection(lora.rank, module.out_features, bias=False)  # type: ignore[arg-type]
    module.lora_dropout = dropout  # type: ignore[assignment]
    module.lora_scale = lora.scale  # type: ignore[assignment]
    extend(module, _Adapted)


def _adapt_stack(experts: nn.Module, name: str, a: tuple[int, ...], b: tuple[int, ...], scale: float) -> None:
    """Adds A `[E, r, in]` and B `[E, out, r]` of the stack `name` to a block of experts."""
    for part, shape in (("lora_A", a), ("lora_B", b)):
        if not hasattr(experts, part):
            experts.add_module(part, nn.Module())
        experts.get_submodule(part).register_parameter(name, nn.Parameter(torch.empty(shape)))
    experts.lora_scale = scale  # type: ignore[assignment]


@dataclass(frozen=True)
class Adapted:
    """The matrix of one expert and its adapter, or a stack of them. `weight`: `[out, in]`, or `[E,
    out, in]`. `a`: `[r, in]`, or `[E, r, in]`. `b`: `[out, r]`, or `[E, out, r]`. `scale`: s."""

    weight: Tensor | Quantised | InFp8
    a: Tensor
    b: Tensor
    scale: float


Matrix = Tensor | Quantised | InFp8 | Adapted
"""The matrix of one expert, `[out, in]`."""
Stack = Matrix
"""The matrices of all experts, `[E, out, in]`."""


def unbound(stack: Stack) -> Sequence[Matrix]:
    """Returns the matrices of a stack, expert by expert."""
    if not isinstance(stack, Adapted):
        return stack.unbind()
    weights: Sequence[Tensor | Quantised | InFp8] = stack.weight.unbind()
    parts = zip(weights, stack.a.unbind(), stack.b.unbind(), strict=True)
    return [Adapted(weight, a, b, stack.scale) for weight, a, b in parts]


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """Multiplies rows `[n, in]` by an expert's matrix: `[n, out]`."""
    if isinstance(matrix, Tensor):
        return linear(x, matrix)
    if isinstance(matrix, Quantised | InFp8):
        return matrix.product(x)
    return product(x, matrix.weight) + linear(linear(x, matrix.a), matrix.b) * matrix.scale


def grouped_product(rows: Tensor, stack: Stack, ends_E: Tensor) -> Tensor:
    """Multiplies rows `[N, in]` by their experts' matrices in one kernel: `[N, out]`. `rows`:
    sorted by expert, in bf16. `ends_E`: where each expert's rows end, int32 `[E]`."""
    if isinstance(stack, Tensor):
        return grouped_linear(rows, stack, ends_E)
    if isinstance(stack, Quantised | InFp8):
        return stack.product(rows, ends_E)
    low = grouped_product(rows, stack.a, ends_E)
    return grouped_product(rows, stack.weight, ends_E) + grouped_product(low, stack.b, ends_E) * stack.scale
