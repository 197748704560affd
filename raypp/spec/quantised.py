"""Quantised frozen matrices (`model.lora.base`): which they are, and their bytes. Without torch.

A matrix is quantised row by row, so no cut between rows changes a bit of it. The layout of a row is
in `raypp.models.quantised_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, get_args

from raypp.errors import Problem
from raypp.spec.families import family_of
from raypp.spec.family import Weight
from raypp.spec.models import DecoderOptions

Base = Literal["int8", "nf4"]
BASES: tuple[Base, ...] = get_args(Base)

BLOCK = 64
"""Weights of a row that share a scale in nf4, as in QLoRA (arXiv:2305.14314)."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of 4-bit NormalFloat (QLoRA, arXiv:2305.14314, appendix E)."""
_SCALE_BYTES = 4
_ROUTERS = ("gate", "router", "shared_expert_gate")


def quantised_base(options: DecoderOptions) -> Base | None:
    """Returns how a model's frozen matrices are quantised; None if they are not."""
    lora = options.lora
    return lora.base if lora is not None and (lora.base == "int8" or lora.base == "nf4") else None


def row_bytes(base: Base, width: int) -> int:
    """Returns the bytes of a row of `width` weights.

    int8: a byte per weight and the row's fp32 scale. nf4: half a byte per weight, a byte per block
    for its scale, and the row's fp32 step of those scales.

    Raises:
        ValueError: nf4 cannot store rows of this width.
    """
    if base == "int8":
        return width + _SCALE_BYTES
    if width % BLOCK:
        raise ValueError(f"nf4 needs rows of a multiple of {BLOCK} weights, not {width}")
    return width // 2 + width // BLOCK + _SCALE_BYTES


def is_quantised(weight: Weight) -> bool:
    """Returns whether a quantised base quantises a weight of a layer.

    It quantises the matrices of attention, feed-forward blocks and experts. Routers stay as they
    are, because their small matrices decide which experts run; so do embeddings, norms and biases.
    """
    dims = {"attention": 2, "feed_forward": 2, "experts": 3}.get(weight.part)
    module = weight.name.removesuffix(".weight").rpartition(".")[2]
    return len(weight.shape) == dims and module not in _ROUTERS


def quantised_names(options: DecoderOptions) -> frozenset[str]:
    """Returns the global names of the matrices that `model.lora.base` quantises."""
    family = family_of(options)
    if family is None or quantised_base(options) is None:
        return frozenset()
    return frozenset(
        f"model.layers.{index}.{weight.name}"
        for index in range(options.num_layers)
        for weight in family.weights(options, index)
        if is_quantised(weight)
    )


def quantised_bytes(base: Base, weight: Weight) -> int:
    """Returns the bytes of a quantised matrix, or of a stack of them."""
    return prod(weight.shape[:-1]) * row_bytes(base, weight.shape[-1])


def width_problems(options: DecoderOptions) -> Iterator[Problem]:
    """Finds matrices whose rows `model.lora.base` cannot store: one problem per width."""
    family = family_of(options)
    if quantised_base(options) != "nf4" or family is None:
        return
    seen: set[int] = set()
    for index in range(options.num_layers):
        for weight in filter(is_quantised, family.weights(options, index)):
            width = weight.shape[-1]
            if width % BLOCK and width not in seen:
                seen.add(width)
                fault = f"nf4 has blocks of {BLOCK} weights, but model.layers.{index}.{weight.name} has rows of {width}"
                yield Problem("model.lora.base", fault, "use int8, which takes any width")
