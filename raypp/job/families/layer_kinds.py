"""What several families share: windows of some layers, positions in a part of each head."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from raypp.errors import JobError, Problem
from raypp.job import limits
from raypp.job.family import EXACT, SETTINGS
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import DecoderOptions, WindowOptions
from raypp.job.rope import Rotary


class OneWindowOptions(DecoderOptions):
    """Options of families whose layers have all the same window, or none."""

    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)


SLIDING, FULL = "sliding_attention", "full_attention"
_UNLIMITED = limits.WIDTH
"""What export writes for no window: transformers fails on null if layers may have one."""


def read_types(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Returns the kinds of layers; null if they follow the family's pattern, also for a window that
    export wrote for null. Without them, config.json may have a `sliding_window_pattern`."""
    count, other = config["num_hidden_layers"], config.get("sliding_window_pattern") or every
    kinds = list(config.get("layer_types") or pattern(count, other))
    window = {"sliding_window": None} if config.get("sliding_window") == _UNLIMITED else {}
    return {"layer_types": None if kinds == pattern(count, every) else tuple(kinds), **window}


def pattern(layers: int, every: int, other: str = SLIDING) -> list[str]:
    """Returns the kinds of layers if every `every`-th has full attention."""
    return [other if (index + 1) % every else FULL for index in range(layers)]


def write_types(options: WindowOptions) -> dict[str, Any]:
    """Returns the kinds of layers and the window for config.json."""
    return {
        "layer_types": [SLIDING if options.slides(index) else FULL for index in range(options.num_layers)],
        "sliding_window": _UNLIMITED if options.sliding_window is None else options.sliding_window,
    }


_WINDOW, _FULL_LAYERS = 4096, 28
"""Values of missing keys."""


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the window and the kinds of layers. Raises JobError: a window is missing."""
    window = config.get("sliding_window", _WINDOW) if config.get("use_sliding_window") else None
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None and window is not None:
        full = config.get("max_window_layers")
        full = _FULL_LAYERS if full is None else full
        kinds = [SLIDING if index >= full else FULL for index in range(count)]
    if kinds is not None and window is None:
        if SLIDING in kinds:
            fault = f"{place}: layer_types has {SLIDING}, but there is no window"
            raise JobError(Problem("model.from_hf", fault, "set use_sliding_window and sliding_window"))
        kinds = None
    return {"sliding_window": window, "layer_types": None if kinds is None else tuple(kinds)}


def write(options: WindowOptions) -> dict[str, Any]:
    """Returns the keys of the window."""
    slides = [options.sliding_window is not None and options.slides(index) for index in range(options.num_layers)]
    return {
        "use_sliding_window": options.sliding_window is not None,
        "sliding_window": options.sliding_window,
        "max_window_layers": slides.index(True) if True in slides else options.num_layers,
        "layer_types": [SLIDING if each else FULL for each in slides],
    }


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
