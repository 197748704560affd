"""What a model's parts are made of, in numbers: from the parameters that its family declares.

A user's own factory declares nothing. Its numbers come from the model that it builds (`count`), which needs torch
and so another process; until then they are those of a Llama with the same sizes, and a plan says so
(`sizes_remark`). The cut rests on those in any case: every rank must find the same one, also where nobody counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from raypp.spec.families import FAMILIES, family_of
from raypp.spec.family import Weight, embedding, final_norm, projection
from raypp.spec.models import DecoderOptions


@dataclass(frozen=True)
class LayerSize:
    """One layer.

    Attributes:
        parameters: All of them.
        experts: Those of experts, which `mesh.ep` spreads.
        multiplied: Those in matrices that one token is multiplied with.
        inner: Width of the feed-forward block that one token passes; with experts, of all it is sent to.
        sent: Experts that one token is sent to.
    """

    parameters: int
    experts: int
    multiplied: int
    inner: int
    sent: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """A model.

    Attributes:
        layers: By global index.
        first: Parameters that the first stage holds besides its layers.
        last: Parameters that the last stage holds besides its layers, a copy of tied embeddings counted in.
        whole: Parameters of the model; tied embeddings count once.
    """

    layers: tuple[LayerSize, ...]
    first: int
    last: int
    whole: int

    def stage_parameters(self, layers: range, *, first: bool, last: bool) -> int:
        """Parameters of a stage. With one stage a tied projection is the embedding itself."""
        if first and last:
            return self.whole
        ends = (self.first if first else 0) + (self.last if last else 0)
        return ends + sum(self.layers[index].parameters for index in layers)

    def stage_experts(self, layers: range) -> int:
        """Parameters of a stage that belong to experts."""
        return sum(self.layers[index].experts for index in layers)


_counted: dict[DecoderOptions, ModelSizes] = {}
_not_counted: dict[DecoderOptions, str] = {}


def sizes_of(model: DecoderOptions) -> ModelSizes:
    """A model's numbers: counted where somebody did, else declared."""
    return _counted.get(model) or declared_sizes(model)


def sizes_remark(model: DecoderOptions) -> str | None:
    """What a plan must say of the numbers of a user's own factory; None for a family that declares them."""
    if family_of(model) is not None:
        return None
    llama = "those of a Llama with the same sizes"
    if model in _counted:
        counted = "parameters, their memory and FLOPs are counted from the model it builds"
        return f"{model.kind}: {counted}; the cut, activations and messages are {llama}"
    why = _not_counted.get(model, "nobody built it")
    return f"{model.kind} is not counted ({why}): parameters, memory, FLOPs, cut and times are {llama}"


@lru_cache(maxsize=64)
def declared_sizes(model: DecoderOptions) -> ModelSizes:
    """What the model's family declares; of a user's own factory, what a Llama with the same sizes has."""
    family = family_of(model) or FAMILIES["llama"]
    layers = tuple(_layer(family.weights(model, index), model) for index in range(model.num_layers))
    matrix = embedding(model) if model.tie_embeddings else projection(model)
    first, last = embedding(model).parameters, matrix.parameters + final_norm(model).parameters
    whole = sum(weight.parameters for weight in family.model_weights(model).values())
    return ModelSizes(layers, first, last, whole)


def _layer(weights: Iterable[Weight], model: DecoderOptions) -> LayerSize:
    parameters = experts = multiplied = inner = 0
    chosen = getattr(model, "experts_per_token", 0)
    for weight in weights:
        parameters += weight.parameters
        passes = 1
        if weight.part == "experts":
            experts += weight.parameters
            passes = chosen
        if weight.part != "norm" and len(weight.shape) > 1:
            multiplied += passes * prod(weight.shape[-2:])
        if weight.residual and weight.part in ("feed_forward", "experts"):
            inner += passes * weight.shape[-1]
    return LayerSize(parameters, experts, multiplied, inner, chosen if experts else 0)


def count(model: DecoderOptions, built: Mapping[str, Any]) -> None:
    """Takes the numbers of a user's own factory from what it builds; `sizes_of` gives them from now on.

    Every token is taken to be multiplied with every matrix.

    Args:
        model: The `model:` section.
        built: What `raypp.measure.built_sizes` answers: `layers` (the shapes of each layer's parameters), `first`,
            `last` and `whole` as in `ModelSizes`.
    """
    guess = declared_sizes(model)
    layers = []
    for index, shapes in enumerate(built["layers"]):
        multiplied = sum(prod(shape) for shape in shapes if len(shape) > 1)
        layers.append(LayerSize(sum(map(prod, shapes)), 0, multiplied, guess.layers[index].inner))
    _counted[model] = ModelSizes(tuple(layers), built["first"], built["last"], built["whole"])


def not_counted(model: DecoderOptions, why: str) -> None:
    """Notes why a user's own factory could not be counted, for `sizes_remark`."""
    _not_counted[model] = why
