"""Layers with a window in config.json, for families in which every n-th layer has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypp.spec import limits
from raypp.spec.models import WindowOptions

SLIDING, FULL = "sliding_attention", "full_attention"
_UNLIMITED = limits.WIDTH
"""What export writes for no window: transformers fails on null if layers may have one."""


def read_types(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Returns the kinds of layers; null if they follow the family's pattern.

    Also null for the window if export wrote one for null.

    A config.json without them may have another pattern, `sliding_window_pattern`.
    """
    count, other = config["num_hidden_layers"], config.get("sliding_window_pattern") or every
    kinds = list(config.get("layer_types") or pattern(count, other))
    window = {"sliding_window": None} if config.get("sliding_window") == _UNLIMITED else {}
    return {"layer_types": None if kinds == pattern(count, every) else tuple(kinds), **window}


def pattern(layers: int, every: int) -> list[str]:
    """Returns the kinds of layers if every `every`-th has no window."""
    return [SLIDING if (index + 1) % every else FULL for index in range(layers)]


def write_types(options: WindowOptions) -> dict[str, Any]:
    """Returns the kinds of layers and the window for config.json."""
    return {
        "layer_types": [SLIDING if options.slides(index) else FULL for index in range(options.num_layers)],
        "sliding_window": _UNLIMITED if options.sliding_window is None else options.sliding_window,
    }
