"""What families share that encode the positions in a part of each head only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from raypp.spec.models import DecoderOptions
from raypp.spec.rope import Rotary

_KEY = "partial_rotary_factor"


class PartialRotaryOptions(DecoderOptions):
    """Options of these families."""

    rotary_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""


def rotary(options: PartialRotaryOptions, index: int) -> Rotary:
    """Returns the rotary encoding of a layer."""
    return Rotary(int(options.dim_per_head * options.rotary_share), options.rope_theta, options.rope)


def reader(default: float) -> Callable[[Mapping[str, Any], str], dict[str, Any]]:
    """Returns a family's `HfFormat.read`.

    Args:
        default: The share that transformers takes when config.json has none.
    """

    def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
        # Transformers 5 writes it to rope_parameters, transformers 4 to the top level.
        scaling = config.get("rope_parameters") or {}
        return {"rotary_share": scaling.get(_KEY, config.get(_KEY, default))}

    return read


def write(options: PartialRotaryOptions) -> dict[str, Any]:
    """Returns the share for config.json."""
    return {_KEY: options.rotary_share}
