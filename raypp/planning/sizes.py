"""Sizes of a model's parts, derived from the parameters that its family declares.

A user's own factory declares nothing. Its sizes come from the model that it builds (`count`), which
needs torch and therefore another process. Until then they are those of a Llama with the same
options, and the plan says so (`sizes_remark`). The cut always uses the latter: every rank must
compute the same cut, even if nothing was counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from raypp.job.family import Weight, embedding, final_norm, projection
from raypp.job.known_families import counted_family, family_of
from raypp.job.layer_rules import StateRule
from raypp.job.lora import Adapter, also_trained, is_norm, layer_adapters, trains_part
from raypp.job.models import DecoderOptions
from raypp.job.tensor_parts import adapters_on_rank, end_on_rank, layer_on_rank


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one layer.

    Attributes:
        parameters: All parameters.
        experts: Parameters of experts, which `mesh.ep` splits.
        multiplied: Parameters of matrices that each token is multiplied by.
        inner: Width of the feed-forward block that each token passes; with experts, of all it is
            routed to.
        sent: Number of experts that each token is routed to.
        largest: Parameters of the largest matrix that is trained; of a stack of experts' matrices
            together.
        trained: With `model.lora`, the parameters that are trained: adapters, and norms if they are
            in `also_train`.
        expert_adapters: Those of them that belong to experts.
        adapted: Parameters of adapters' matrices that each token is multiplied by.
        fp32: Parameters that are trained in fp32 in every precision.
    """

    parameters: int
    experts: int
    multiplied: int
    inner: int
    sent: int = 0
    largest: int = 0
    trained: int = 0
    expert_adapters: int = 0
    adapted: int = 0
    fp32: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    Attributes:
        first: Parameters of the first stage besides its layers.
        last: Parameters of the last stage besides its layers, including a copy of tied embeddings.
        whole: Parameters of the model. Tied embeddings count once.
        frozen: Only adapters are trained, and what `also_train` names.
        ends_trained: With `frozen`, trained parameters of the first stage besides its layers, of
            the last, and of both on one.
    """

    layers: tuple[LayerSize, ...]
    first: int
    last: int
    whole: int
    frozen: bool = False
    ends_trained: tuple[int, int, int] = (0, 0, 0)

    def stage_parameters(self, layers: range, *, first: bool, last: bool) -> int:
        """Returns the parameters of a stage; on a single one, a tied projection counts once."""
        if first and last:
            return self.whole
        ends = (self.first if first else 0) + (self.last if last else 0)
        return ends + self._sum("parameters", layers)

    def stage_experts(self, layers: range) -> int:
        """Returns the parameters of a stage that belong to experts."""
        return self._sum("experts", layers)

    def stage_fp32(self, layers: range) -> int:
        """Returns the parameters of a stage that are trained in fp32 in every precision."""
        return self._sum("fp32", layers)

    def stage_trained(self, layers: range, *, first: bool, last: bool) -> tuple[int, int]:
        """Returns the parameters of a stage that are trained, and those of them of experts."""
        if not self.frozen:
            return self.stage_parameters(layers, first=first, last=last), self.stage_experts(layers)
        begin, end, both = self.ends_trained
        ends = both if first and last else begin * first + end * last
        return ends + self._sum("trained", layers), self._sum("expert_adapters", layers)

    @cached_property
    def kinds(self) -> tuple[LayerSize, ...]:
        """The different layers, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.layers))

    def mean(self, name: str) -> float:
        """Returns the mean of a number of the layers."""
        return self._sums[name][-1] / len(self.layers)

    def _sum(self, name: str, layers: range) -> int:
        return self._sums[name][layers.stop] - self._sums[name][layers.start]

    @cached_property
    def _sums(self) -> dict[str, list[int]]:
        """Sums of each number over the first 0, 1, 2, … layers."""
        names = [field.name for field in fields(LayerSize)]
        return {name: [0, *accumulate(getattr(layer, name) for layer in self.layers)] for name in names}


@lru_cache(maxsize=64)
def mixers(model: DecoderOptions) -> tuple[tuple[StateRule | None, int, int], ...]:
    """Returns what each layer has instead of attention, and the widths of query and key heads."""
    sized = [(index, model.of_layer(index)) for index in range(model.num_layers)]
    return tuple(
        (model.state_rule(index), own.num_heads * own.dim_per_head, own.kv_heads * own.dim_per_head)
        for index, own in sized
    )


_counted: dict[DecoderOptions, ModelSizes] = {}
_not_counted: dict[DecoderOptions, str] = {}


def sizes_of(model: DecoderOptions, tp: int = 1) -> ModelSizes:
    """Returns a model's sizes: counted ones if there are any, else declared ones. `tp`: only of
    what one rank of a tp group holds."""
    return declared_sizes(model, tp) if tp > 1 else _counted.get(model) or declared_sizes(model)


def sizes_remark(model: DecoderOptions) -> str | None:
    """Returns the plan's remark on the sizes of a user's own factory; None for a family."""
    if family_of(model) is not None:
        return None
    llama = "those of a Llama with the same sizes"
    if model in _counted:
        counted = "parameters, their memory and FLOPs are counted from the model it builds"
        return f"{model.kind}: {counted}; the cut, activations and messages are {llama}"
    why = _not_counted.get(model, "it was not built")
    return f"{model.kind} is not counted ({why}): parameters, memory, FLOPs, cut and times are {llama}"


@lru_cache(maxsize=64)
def declared_sizes(model: DecoderOptions, tp: int = 1) -> ModelSizes:
    """Returns the sizes that the model's family declares, of what one of `tp` ranks holds. For a
    user's own factory, returns those of a Llama with the same options."""
    family = counted_family(model)
    layers = tuple(
        _with_adapters(
            layer_on_rank(model, index, family.weights(model, index), tp),
            adapters_on_rank(model, index, layer_adapters(model, index), tp),
            model,
        )
        for index in range(model.num_layers)
    )
    embed = end_on_rank(embedding(model), tp)
    matrix = embed if model.tie_embeddings else end_on_rank(projection(model), tp)
    norm = sum(weight.parameters for weight in final_norm(model))
    more = sum(weight.parameters for weight in family.first_weights(model))
    first, last = embed.parameters, matrix.parameters + norm
    whole = sum(layer.parameters for layer in layers) + last + more + (0 if model.tie_embeddings else first)
    first += more
    also = also_trained(model)
    begin = {embed.name, *(weight.name for weight in family.first_weights(model))} & also.keys()
    end = {matrix.name, *(weight.name for weight in final_norm(model))} & also.keys()
    held = {embed.name: embed, matrix.name: matrix}
    trained, trained_last, both = (
        sum(held.get(name, also[name]).parameters for name in part) for part in (begin, end, begin | end)
    )
    return ModelSizes(layers, first, last, whole, model.lora is not None, (trained, trained_last, both))


def _with_adapters(weights: Sequence[Weight], adapters: Sequence[Adapter], model: DecoderOptions) -> LayerSize:
    layer = _layer(weights, model)
    if model.lora is None:
        return layer
    own = _layer([weight for adapter in adapters for weight in (adapter.a, adapter.b)], model)
    norms = sum(weight.parameters for weight in weights if is_norm(weight.name)) if trains_part(model, "norms") else 0
    return replace(
        layer,
        parameters=layer.parameters + own.parameters,
        experts=layer.experts + own.experts,
        multiplied=layer.multiplied + own.multiplied,
        largest=own.largest,
        trained=own.parameters + norms,
        expert_adapters=own.experts,
        adapted=own.multiplied,
        fp32=0,
    )


def _layer(weights: Iterable[Weight], model: DecoderOptions) -> LayerSize:
    parameters = experts = multiplied = inner = largest = fp32 = 0
    chosen = getattr(model, "experts_per_token", 0)
    for weight in weights:
        if weight.part == "state":
            continue
        parameters += weight.parameters
        fp32 += weight.parameters if weight.fp32 else 0
        largest = max(largest, weight.parameters)
        passes = 1
        if weight.part == "experts":
            experts += weight.parameters
            passes = chosen
        if weight.part != "norm" and len(weight.shape) > (2 if weight.part == "experts" else 1):
            multiplied += passes * prod(weight.shape[-2:])
        if weight.residual and weight.part in ("feed_forward", "experts"):
            inner += passes * weight.shape[-2 if weight.transposed else -1]
    return LayerSize(parameters, experts, multiplied, inner, chosen if experts else 0, largest, fp32=fp32)


def count(model: DecoderOptions, built: Mapping[str, Any]) -> None:
    """Takes the sizes of a user's own factory from the model it builds. `sizes_of` returns them
    from now on. Assumes that every token is multiplied by every matrix. `model`: the `model:`
    section. `built`: answer of `raypp.tools.built_sizes`: `layers` (the shapes of each layer's
    parameters), `first`, `last` and `whole` as in `ModelSizes`."""
    guess = declared_sizes(model)
    layers = []
    for index, shapes in enumerate(built["layers"]):
        multiplied = sum(prod(shape) for shape in shapes if len(shape) > 1)
        largest = max(map(prod, shapes), default=0)
        layers.append(LayerSize(sum(map(prod, shapes)), 0, multiplied, guess.layers[index].inner, largest=largest))
    _counted[model] = ModelSizes(tuple(layers), built["first"], built["last"], built["whole"])


def not_counted(model: DecoderOptions, why: str) -> None:
    """Notes why a user's own factory was not counted, for `sizes_remark`."""
    _not_counted[model] = why
