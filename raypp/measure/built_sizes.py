"""Measures the model of a user's own factory, with stages built on meta, which takes no memory.

The answer is `{"layers", "first", "last", "whole"}`: the shapes of each layer's parameters, and
parameter counts as in `raypp.planning.sizes.ModelSizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from raypp.errors import RayppError, RunFailedError, in_words
from raypp.models.stage import build_stage
from raypp.spec.load import parse_job
from raypp.spec.models import DecoderOptions

Shapes = dict[str, tuple[int, ...]]


def built_sizes(options: DecoderOptions) -> dict[str, Any]:
    """Returns the answer for one `model:` section."""
    last = options.num_layers - 1
    layers = [_shapes(options, range(index, index + 1)) for index in range(options.num_layers)]
    first_stage = _shapes(options, range(1), first=True)
    last_stage = _shapes(options, range(last, last + 1), last=True)
    whole = _shapes(options, range(options.num_layers), first=True, last=True)
    return {
        "layers": [list(shapes.values()) for shapes in layers],
        "first": _parameters(first_stage) - _parameters(layers[0]),
        "last": _parameters(last_stage) - _parameters(layers[last]),
        "whole": _parameters(whole),
    }


def _shapes(options: DecoderOptions, layers: range, *, first: bool = False, last: bool = False) -> Shapes:
    stage = build_stage(options, layers, first=first, last=last)
    return {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}


def _parameters(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers `{"job"}`: see `built_sizes`.

    Raises:
        RunFailedError: The model cannot be built.
    """
    try:
        return built_sizes(parse_job(request["job"]).model)
    except RayppError as error:
        raise RunFailedError(error.problems) from error
    except Exception as error:  # the user's own code may raise anything
        raise RunFailedError(in_words(error)) from error
