"""The window of Qwen 2 and 3 as their config.json has it: only if `use_sliding_window` is true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypp.errors import JobError, Problem
from raypp.families.layer_kinds import FULL, SLIDING
from raypp.spec.models import WindowOptions

_WINDOW, _FULL_LAYERS = 4096, 28
"""Values of missing keys."""


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the window and the kinds of layers.

    Raises:
        JobError: Layers have a window, but there is none.
    """
    window = config.get("sliding_window", _WINDOW) if config.get("use_sliding_window") else None
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None and window is not None:
        full = config.get("max_window_layers")
        full = _FULL_LAYERS if full is None else full
        kinds = [SLIDING if index >= full else FULL for index in range(count)]
    if kinds is not None and window is None:
        if SLIDING in kinds:
            what = f"{place}: layer_types has {SLIDING}, but there is no window"
            raise JobError(Problem("model.from_hf", what, "set use_sliding_window and sliding_window"))
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
