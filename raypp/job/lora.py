"""`model.lora`: adapters' names and shapes, quantised matrices (`base`), as the family declares.

The matrix `self_attn.q_proj.weight` `[out, in]` gets `self_attn.q_proj.lora_A.weight` `[r, in]` and
`self_attn.q_proj.lora_B.weight` `[out, r]`. The stack `mlp.experts.up_proj` `[E, out, in]` gets
`mlp.experts.lora_A.up_proj` `[E, r, in]` and `mlp.experts.lora_B.up_proj` `[E, out, r]`. A stack
`[E, in, out]` gets the same.

A matrix is quantised by rows, so cuts between rows change no bit (`stages.models.quantised_rows`).
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

from raypp.errors import Problem
from raypp.job.family import Weight, embedding, projection
from raypp.job.known_families import family_of
from raypp.job.models import DecoderOptions, WholePart

ALL_LINEAR = "all-linear"
Base = Literal["fp8", "int8", "nf4"]
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
FP8_WIDTH = 16
"""Both widths of a matrix in fp8 are multiples of it, and its rows begin at such bytes, for the
kernels."""
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one matrix of a layer, or of one stack of experts' matrices.

    Attributes:
        module: Name of the matrix within its layer, without `.weight`.
        a: `[r, in]` or `[E, r, in]`.
        b: `[out, r]` or `[E, out, r]`.
        transposed: The stack is `[E, in, out]`.
    """

    module: str
    a: Weight
    b: Weight
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return len(self.a.shape) > 2

    @property
    def parameters(self) -> int:
        return self.a.parameters + self.b.parameters


def layer_adapters(options: DecoderOptions, index: int) -> list[Adapter]:
    """Returns the adapters of the layer with a global index; none without `model.lora`."""
    family, lora = family_of(options), options.lora
    if family is None or lora is None:
        return []
    adapters, targets = [], frozenset(lora.targets)
    for weight in family.weights(options, index):
        module = _module(weight)
        if module is None or targets.isdisjoint(_targets_of(_global(index, module))):
            continue
        *experts, rows, columns = weight.shape
        if weight.transposed:
            rows, columns = columns, rows
        inside, _, name = module.rpartition(".") if experts else (module, "", "weight")
        a, b = (
            Weight(f"{inside}.{part}.{name}", (*experts, *shape), weight.part)
            for part, shape in (("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank)))
        )
        adapters.append(Adapter(module, a, b, weight.transposed))
    return adapters


def model_adapters(options: DecoderOptions) -> dict[str, Adapter]:
    """Returns the adapters of the whole model by the global name of their matrix."""
    return {
        _global(index, adapter.module): adapter
        for index in range(options.num_layers)
        for adapter in layer_adapters(options, index)
    }


def adapted_stacks(options: DecoderOptions) -> set[str]:
    """Returns the ends of the names of experts' matrices that get adapters."""
    adapters = model_adapters(options).values()
    return {in_files(adapter.module).rpartition(".")[2] for adapter in adapters if adapter.stacked}


def adapter_names(matrix: str, adapter: Adapter) -> tuple[str, str]:
    """Returns the global names of A and B of the matrix with a global name."""
    layer = matrix.removesuffix(adapter.module)
    return layer + adapter.a.name, layer + adapter.b.name


def trains_part(options: DecoderOptions, part: WholePart) -> bool:
    """Whether a part trains in full. Tied, embedding and head are one weight."""
    if options.lora is None:
        return True
    tied = options.tie_embeddings and part != "norms"
    return not {part, *(("embed_tokens", "lm_head") if tied else ())}.isdisjoint(options.lora.also_train)


@lru_cache(maxsize=256)
def also_trained(options: DecoderOptions) -> Mapping[str, Weight]:
    """Returns the weights that train in full beside adapters, by global name."""
    family, lora = family_of(options), options.lora
    if family is None or lora is None or not lora.also_train:
        return {}
    parts: dict[str, WholePart] = {embedding(options).name: "embed_tokens", projection(options).name: "lm_head"}
    weights = family.model_weights(options)
    parts |= dict.fromkeys(filter(is_norm, weights), "norms")
    return {name: weight for name, weight in weights.items() if name in parts and trains_part(options, parts[name])}


def is_norm(name: str) -> bool:
    """Whether a weight is the gain or the bias of a norm."""
    return "norm" in name.rpartition(".")[0].rpartition(".")[2]


@lru_cache(maxsize=1024)
def trains(options: DecoderOptions, layers: range, *, first: bool = False, last: bool = False) -> bool:
    """Whether a stage trains. `first`: it has the embedding. `last`: final norm and head."""
    ends = (first and trains_part(options, "embed_tokens")) or (last and trains_part(options, "lm_head"))
    norms = trains_part(options, "norms") and (last or len(layers) > 0)
    return ends or norms or options.lora is None or any(layer_adapters(options, index) for index in layers)


def lowest_trained(options: DecoderOptions) -> int:
    """Returns the index of the lowest layer with a backward: it has trained parameters, or the
    embedding is trained. The number of layers if none has."""
    indices = range(options.num_layers)
    lowest = (i for i in indices if trains(options, range(i, i + 1), first=i == 0))
    return next(lowest, options.num_layers)


def check_targets(options: DecoderOptions) -> Iterator[Problem]:
    """Finds targets that match no matrix of the model."""
    family, lora = family_of(options), options.lora
    if family is None or lora is None:
        return
    modules = [
        _global(index, module)
        for index in range(options.num_layers)
        for weight in family.weights(options, index)
        if (module := _module(weight)) is not None
    ]
    matched = {target for module in modules for target in _targets_of(module)}
    known = list(dict.fromkeys(in_files(module).rpartition(".")[2] for module in modules))
    if not lora.targets:
        yield Problem("model.lora.targets", "is empty: nothing would be trained", f"use {ALL_LINEAR}, or some names")
    for target in lora.targets:
        if target in matched:
            continue
        close = difflib.get_close_matches(target.rpartition(".")[2], known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"use {ALL_LINEAR}, or some of these names"
        fault = f"{target!r} matches no matrix of {options.kind}'s layers; there are: {', '.join(known)}"
        yield Problem("model.lora.targets", fault, fix)


def _module(weight: Weight) -> str | None:
    """Returns the name of the matrix that a weight is; None if it can have no adapter. What gets
    adapters is what a quantised base quantises: `is_quantised` says which and why."""
    return weight.name.removesuffix(".weight") if is_quantised(weight) else None


def _global(index: int, module: str) -> str:
    return f"model.layers.{index}.{module}"


def matches(target: str, name: str) -> bool:
    """Whether a target names a matrix: it is the end of its name in the files, in whole words."""
    return target in _targets_of(name)


def _targets_of(name: str) -> list[str]:
    """Returns all targets that name a matrix."""
    words = in_files(name).split(".")
    return [ALL_LINEAR, *(".".join(words[start:]) for start in range(len(words)))]


def one_in_files(matrix: str) -> bool:
    """Whether experts' matrices are one tensor in Hugging Face's files."""
    return ".fused_" in matrix


def in_files(module: str) -> str:
    """Returns a matrix's name in Hugging Face's files, which name no block of Gemma 4's experts."""
    return module.replace(".fused_", ".").replace(".moe.", ".")


def quantised_base(options: DecoderOptions) -> Base | None:
    """Returns how a model's frozen matrices are quantised; None if they are not."""
    lora = options.lora
    return next((base for base in BASES if lora is not None and lora.base == base), None)


def row_bytes(base: Base, width: int) -> int:
    """Returns the bytes of a row of `width` weights. int8: a byte per weight and the row's fp32
    scale. nf4: half a byte per weight, a byte per block for its scale, and the row's fp32 step of
    those scales. fp8: as int8, and 12 bytes: kernels need rows that begin at multiples of 16.
    Raises ValueError: nf4 or fp8 cannot store rows of this width."""
    if base == "int8":
        return width + _SCALE_BYTES
    if base == "fp8":
        if width % FP8_WIDTH:
            raise ValueError(f"fp8 needs rows of a multiple of {FP8_WIDTH} weights, not {width}")
        return width + FP8_WIDTH
    if width % BLOCK:
        raise ValueError(f"nf4 needs rows of a multiple of {BLOCK} weights, not {width}")
    return width // 2 + width // BLOCK + _SCALE_BYTES


def is_quantised(weight: Weight) -> bool:
    """Returns whether a quantised base quantises a weight of a layer. It quantises the matrices of
    attention, feed-forward blocks and experts. Routers stay as they are, because their small
    matrices decide which experts run; so do embeddings, norms and biases."""
    dims = {"attention": 2, "feed_forward": 2, "experts": 3}.get(weight.part)
    words = weight.name.removesuffix(".weight").split(".")[-2:]
    return len(weight.shape) == dims and not any(word in _ROUTERS for word in words)


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
    family, base = family_of(options), quantised_base(options)
    if family is None or base is None or base == "int8":
        return
    layers = (filter(is_quantised, family.weights(options, index)) for index in range(options.num_layers))
    if base == "fp8":
        found = wrong_widths(layers, FP8_WIDTH, f"fp8 needs multiples of {FP8_WIDTH}")
    else:
        found = wrong_widths(layers, BLOCK, f"nf4 has blocks of {BLOCK} weights", dims=1)
    for _, fault in found:
        yield Problem("model.lora.base", fault, "use int8, which takes any width")


def wrong_widths(layers: Iterable[Iterable[Weight]], each: int, needs: str, dims: int = 2) -> Iterator[tuple[int, str]]:
    """Yields each width in the last dims of a matrix that is no multiple of `each`, and a fault
    that names the first such matrix. `layers`: the matrices of each layer of a model."""
    seen: set[int] = set()
    for index, weights in enumerate(layers):
        for weight in weights:
            width = next((width for width in weight.shape[-dims:] if width % each), None)
            if width is not None and width not in seen:
                seen.add(width)
                sizes = " × ".join(map(str, weight.shape))
                yield width, f"{needs}, but model.layers.{index}.{weight.name} is {sizes}"
