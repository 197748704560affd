"""Bytes of a frozen base (`model.lora.base`) on a rank, and of what it is dequantised to."""

from __future__ import annotations

from functools import lru_cache

from raypp.spec.families import counted_family, family_of
from raypp.spec.models import DecoderOptions
from raypp.spec.quantised import is_quantised, quantised_base, quantised_bytes


@lru_cache(maxsize=1024)
def base_bytes(
    model: DecoderOptions,
    layers: range,
    *,
    first: bool,
    last: bool,
    rest: int,
    ep: int = 1,
    without: tuple[str, ...] = (),
) -> int:
    """Returns the bytes of a stage's frozen weights, before fsdp and cp share them.

    Args:
        model: The `model:` section.
        layers: Global indices of the stage's layers.
        first: The stage holds the embedding.
        last: The stage holds the final norm and the projection.
        rest: Bytes of a frozen weight that is not quantised.
        ep: Ranks that share the experts.
        without: Parts (of `Weight.part`) whose quantised matrices are not counted.
    """
    family, base = counted_family(model), quantised_base(model)
    total = 0
    for name, weight in family.stage_weights(model, layers, first=first, last=last).items():
        if base is not None and name.startswith("model.layers.") and is_quantised(weight):
            size = 0 if weight.part in without else quantised_bytes(base, weight)
        else:
            size = rest * weight.parameters
        total += size // ep if weight.part == "experts" else size
    return total


@lru_cache(maxsize=64)
def product_bytes(model: DecoderOptions, width: int, *, ep: int = 1, together: bool = False) -> int:
    """Returns the bytes of the largest matrix while it is dequantised for a product.

    Args:
        model: The `model:` section.
        width: Bytes of an element in the compute dtype.
        ep: Ranks that share the experts.
        together: All experts of a layer are computed by one kernel (CUDA in bf16).
    """
    family = family_of(model)
    if family is None or quantised_base(model) is None:
        return 0
    largest = 0
    for weight in (weight for index in range(model.num_layers) for weight in family.weights(model, index)):
        if is_quantised(weight):
            stacked = weight.part == "experts"
            share = weight.shape[0] if stacked and not together else ep if stacked else 1
            largest = max(largest, weight.parameters // share)
    return width * largest
