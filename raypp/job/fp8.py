"""Which matrices `train.precision: fp8` computes in fp8, and what stands against it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from raypp.errors import Problem
from raypp.job.family import Weight
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import FP8_WIDTH, is_quantised, quantised_base, wrong_widths
from raypp.job.models import DecoderOptions

_GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Small matrices whose results are factors over all later tokens: the gates of a delta rule."""


def layer_in_fp8(job: Job, index: int) -> bool:
    """Whether products of the layer with a global index are in fp8."""
    bf16 = job.train.fp8.bf16_layers
    return job.train.dtypes.fp8 and bf16 <= index < job.model.num_layers - bf16


def matrices_in_fp8(job: Job, index: int) -> list[Weight]:
    """Returns the matrices of a layer whose products are in fp8. Not experts and gates, which stay
    in bf16; not those of a quantised `model.lora.base`, which have products of their own."""
    return _matrices(job.model, index) if layer_in_fp8(job, index) and quantised_base(job.model) is None else []


def _matrices(options: DecoderOptions, index: int) -> list[Weight]:
    weights = [] if (family := family_of(options)) is None else family.weights(options, index)
    matrices = (one for one in weights if len(one.shape) == 2 and is_quantised(one))
    return [one for one in matrices if one.name.removesuffix(".weight").rpartition(".")[2] not in _GATES]


@lru_cache(maxsize=64)
def _sizes(options: DecoderOptions) -> tuple[tuple[int, int], ...]:
    """Returns the weights and the widths of the matrices of each layer."""
    layers = [_matrices(options, index) for index in range(options.num_layers)]
    return tuple((sum(one.parameters for one in layer), sum(sum(one.shape) for one in layer)) for layer in layers)


def sizes_in_fp8(job: Job, layers: Iterable[int]) -> tuple[int, int]:
    """Returns the weights whose products are in fp8, of layers with these global indices, and the
    sum of the widths of their matrices."""
    whole = quantised_base(job.model) == "fp8"
    if not whole and (not job.train.dtypes.fp8 or quantised_base(job.model) is not None):
        return 0, 0
    sizes = _sizes(job.model)
    chosen = [sizes[index] for index in layers if whole or layer_in_fp8(job, index)]
    return sum(weights for weights, _ in chosen), sum(widths for _, widths in chosen)


def fp8_problems(job: Job) -> Iterator[Problem]:
    """Finds what stands against a job's products in fp8."""
    if not job.train.dtypes.fp8:
        return
    layers, base = range(job.model.num_layers), quantised_base(job.model)
    if not any(layer_in_fp8(job, index) for index in layers):
        fault = f"{job.train.fp8.bf16_layers} at both ends leaves none of {len(layers)} layers in fp8"
        yield Problem("train.fp8.bf16_layers", fault, f"use at most {(len(layers) - 1) // 2}, or train.precision bf16")
    if base in ("int8", "nf4"):
        fault = f"fp8 has no matrices to compute with: model.lora.base {base} has them all, dequantised to bf16"
        yield Problem("train.precision", fault, "use bf16, or model.lora.base fp8 or bf16")
    matrices = (matrices_in_fp8(job, index) for index in layers)
    for width, fault in wrong_widths(matrices, FP8_WIDTH, f"fp8 needs multiples of {FP8_WIDTH}"):
        yield Problem("train.precision", fault, f"make {width} a multiple of {FP8_WIDTH}, or use bf16")
