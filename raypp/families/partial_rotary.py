"""What families share that encode the positions in a part of each head only."""

from __future__ import annotations

from pydantic import Field

from raypp.spec.family import EXACT, SETTINGS
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


PARTIAL_SETTINGS = {**SETTINGS, "rotary_share": _KEY}
PARTIAL_EXACT = {key: only for key, only in EXACT.items() if key != _KEY}
