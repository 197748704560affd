"""Which matrices `train.precision: fp8` computes in fp8, and what stands against it. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from raypp.errors import Problem
from raypp.job.family import Weight
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import FP8_WIDTH, is_quantised, quantised_base, wrong_widths
from raypp.job.models import DecoderOptions, with_experts
from raypp.job.tensor_parts import computed_by_all, rows_of_few_heads

_GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Small matrices whose results are factors over all later tokens: the gates of a delta rule."""


def layer_in_fp8(job: Job, index: int) -> bool:
    """Whether products of the layer with a global index are in fp8."""
    bf16 = job.train.fp8.bf16_layers
    return job.train.dtypes.fp8 and bf16 <= index < job.model.num_layers - bf16


def matrices_in_fp8(job: Job, index: int) -> list[Weight]:
    """Returns the matrices of a layer whose products are in fp8. Not those of experts and gates,
    nor those of a quantised `model.lora.base`, which have products of their own."""
    return _matrices(job.model, index) if layer_in_fp8(job, index) and quantised_base(job.model) is None else []


def experts_in_fp8(job: Job, index: int) -> list[Weight]:
    """Returns the stacks of experts' matrices of a layer whose products are in fp8."""
    applies = job.train.fp8.experts and layer_in_fp8(job, index) and quantised_base(job.model) is None
    return _matrices(job.model, index, dims=3) if applies else []


def _matrices(options: DecoderOptions, index: int, dims: int = 2) -> list[Weight]:
    weights = [] if (family := family_of(options)) is None else family.weights(options, index)
    matrices = (one for one in weights if len(one.shape) == dims and is_quantised(one))
    return [one for one in matrices if one.name.removesuffix(".weight").rpartition(".")[2] not in _GATES]


def _on_rank(options: DecoderOptions, index: int, weight: Weight, tp: int) -> Weight:
    """Returns the part of a matrix of a layer that one of `tp` ranks multiplies by."""
    if tp == 1 or not computed_by_all(options, index, weight):
        return weight
    rows, columns = weight.shape
    if weight.residual:
        return replace(weight, shape=(rows, columns // tp))
    head, repeated = options.of_layer(index).dim_per_head, rows_of_few_heads(options, index, weight, tp)
    parts = (head if length == repeated else length // tp for length in weight.joins)
    return replace(weight, shape=(sum(parts) or rows, columns))


class Sizes(NamedTuple):
    """The sizes of what is computed in fp8, on one of `tp` ranks.

    Attributes:
        dense: Weights of matrices that every token is multiplied by.
        experts: Weights of experts, of all of them.
        active: Weights that a token is multiplied by, those of its experts included.
        widths: The sum of the widths of their matrices, per token of all `tp` ranks.
    """

    dense: int = 0
    experts: int = 0
    active: int = 0
    widths: float = 0


@lru_cache(maxsize=64)
def _sizes(options: DecoderOptions, experts: bool, tp: int) -> tuple[Sizes, ...]:
    """Returns the sizes of each layer."""
    chosen = model.experts_per_token if (model := with_experts(options)) is not None else 0
    layers = []
    for index in range(options.num_layers):
        dense, stacks = _matrices(options, index), _matrices(options, index, dims=3) if experts else []
        stacks = [one for one in stacks if not (one.transposed and quantised_base(options))]  # are dequantised
        each = [one.parameters // one.shape[0] for one in stacks]
        here = [_on_rank(options, index, one, tp) for one in dense]
        weights, widths = sum(one.parameters for one in here), chosen * sum(sum(one.shape[1:]) for one in stacks) / tp
        widths += sum(sum(one.shape) / (1 if computed_by_all(options, index, one) else tp) for one in here)
        layers.append(Sizes(weights, sum(one.parameters for one in stacks), weights + chosen * sum(each), widths))
    return tuple(layers)


def sizes_in_fp8(job: Job, layers: Iterable[int], tp: int = 1) -> Sizes:
    """Returns the sizes of what is computed in fp8 of layers with these global indices, on one of
    `tp` ranks."""
    whole = quantised_base(job.model) == "fp8"
    if not whole and (not job.train.dtypes.fp8 or quantised_base(job.model) is not None):
        return Sizes()
    sizes = _sizes(job.model, job.train.fp8.experts, tp)
    return Sizes(*map(sum, zip(*(sizes[index] for index in layers if whole or layer_in_fp8(job, index)), strict=True)))


def fp8_problems(job: Job) -> Iterator[Problem]:
    """Finds what stands against a job's products in fp8."""
    experts, base, lacks = job.train.fp8.experts, quantised_base(job.model), ""
    multiplies = base == "fp8" or (base is None and job.train.dtypes.fp8)
    if experts and not multiplies:
        lacks = f"train.precision is {job.train.precision}, model.lora.base {base or 'bf16'}"
    if lacks or (experts and with_experts(job.model) is None):
        fault = f"true, but {lacks or 'the model has no experts'}"
        yield Problem("train.fp8.experts", fault, "leave it out, or use train.precision fp8, or model.lora.base fp8")
    layers, tp = range(job.model.num_layers), job.mesh.tp
    if multiplies and tp > 1:
        every = _matrices if base == "fp8" else lambda _, index: matrices_in_fp8(job, index)
        parts = [[_on_rank(job.model, index, one, tp) for one in every(job.model, index)] for index in layers]
        needs = f"{tp} ranks each have a part of a matrix, and fp8 needs multiples of {FP8_WIDTH}"
        for _, fault in wrong_widths(parts, FP8_WIDTH, needs):
            yield Problem("mesh.tp", f"{fault} on each", "use fewer, or mesh.fsdp")
    if not job.train.dtypes.fp8:
        return
    if not any(layer_in_fp8(job, index) for index in layers):
        fault = f"{job.train.fp8.bf16_layers} at both ends leaves none of {len(layers)} layers in fp8"
        yield Problem("train.fp8.bf16_layers", fault, f"use at most {(len(layers) - 1) // 2}, or train.precision bf16")
    if base in ("int8", "nf4"):
        fault = f"fp8 has no matrices to compute with: model.lora.base {base} has them all, dequantised to bf16"
        yield Problem("train.precision", fault, "use bf16, or model.lora.base fp8 or bf16")
    matrices = (matrices_in_fp8(job, index) + experts_in_fp8(job, index) for index in layers)
    for width, fault in wrong_widths(matrices, FP8_WIDTH, f"fp8 needs multiples of {FP8_WIDTH}"):
        other = "train.fp8.experts false" if experts and ".experts." in fault else "bf16"
        yield Problem("train.precision", fault, f"make {width} a multiple of {FP8_WIDTH}, or use {other}")
