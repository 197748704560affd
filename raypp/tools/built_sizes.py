"""Measures the model of a user's own factory, with stages built on meta, which takes no memory. The
answer is `{"layers", "first", "last", "whole"}`: the shapes of each layer's parameters, and
parameter counts as in `raypp.planning.sizes.ModelSizes`."""

from collections.abc import Mapping
from math import prod
from typing import Any

from raypp.control.calls import Tell
from raypp.errors import RayppError, RunFailedError, origin_in_words
from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions
from raypp.stages.models.stage import build_stage


def answer(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Answers `{"job"}`, for its `model:` section. Raises RunFailedError: it cannot be built."""
    try:
        options = parse_job(request["job"]).model
        layers = [_shapes(options, range(index, index + 1)) for index in range(options.num_layers)]
        first_stage = _shapes(options, range(1), first=True)
        last_stage = _shapes(options, range(options.num_layers - 1, options.num_layers), last=True)
        whole = _shapes(options, range(options.num_layers), first=True, last=True)
    except RayppError as error:
        raise RunFailedError(error.problems) from error
    except Exception as error:  # the user's own code may raise anything
        raise RunFailedError(origin_in_words(error)) from error
    return {
        "layers": layers,
        "first": _parameters(first_stage) - _parameters(layers[0]),
        "last": _parameters(last_stage) - _parameters(layers[-1]),
        "whole": _parameters(whole),
    }


def _shapes(
    options: DecoderOptions, layers: range, *, first: bool = False, last: bool = False
) -> list[tuple[int, ...]]:
    stage = build_stage(options, layers, first=first, last=last)
    return [tuple(parameter.shape) for parameter in stage.parameters()]


def _parameters(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(prod, shapes))
