"""Gemma 3, text only: windows in five of six layers, with a rotary base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from raypp.errors import JobError, Problem
from raypp.families import gemma
from raypp.spec.family import Family, HfFormat, Only, Weight
from raypp.spec.rope import RopeOptions, Rotary

if TYPE_CHECKING:
    from raypp.models.sandwich import SandwichLayer

_PATTERN = 6
_GLOBAL, _LOCAL = 1_000_000.0, 10_000.0


class Gemma3Options(gemma.GemmaOptions):
    """Options of Gemma 3. `rope_theta` and `rope` are those of layers without a window."""

    sliding_window: int | None = Field(default=512, ge=1)
    """Tokens that a query of a layer with a window sees, itself included. null: no layer has one.
    """
    rope_theta: float = Field(default=_GLOBAL, gt=0)
    """Base of the rotary position encoding."""
    local_rope_theta: float = Field(default=_LOCAL, gt=0)
    """Base of the rotary position encoding of layers with a window."""

    def slides(self, index: int) -> bool:
        return (index + 1) % _PATTERN != 0 if self.layer_types is None else super().slides(index)


def layer_weights(options: Gemma3Options, index: int) -> list[Weight]:
    return gemma.layer_weights(options, head_norms=True)


def build_layer(options: Gemma3Options, index: int) -> SandwichLayer:
    from raypp.models.sandwich import SandwichLayer

    return SandwichLayer(options, index, head_norms=True)


def rotary(options: Gemma3Options, index: int) -> Rotary:
    if options.slides(index):
        return Rotary(options.dim_per_head, options.local_rope_theta)
    return Rotary(options.dim_per_head, options.rope_theta, options.rope)


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the kinds of layers and both rotary encodings, as transformers 4 or 5 writes them."""
    both = config.get("rope_parameters") or {}
    whole = {**(both.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    window = both.get("sliding_attention") or {}
    kind = whole.get("rope_type", whole.get("type", "default")) or "default"
    known = {"rope_type", "type", "rope_theta", "factor"}
    others = ({*whole} - known) | ({*both} - {"full_attention", "sliding_attention"})
    if kind not in ("default", "linear") or window.get("rope_type", "default") != "default" or others:
        key = "rope_parameters" if both else "rope_scaling"
        what = f"{place}: {key} {config[key]!r} is not supported"
        raise JobError(Problem("model.from_hf", what, "use a model with linear scaling of its global layers, or none"))
    return {
        **gemma.layer_types(config, _PATTERN),
        "rope_theta": float(whole.get("rope_theta") or config.get("rope_theta") or _GLOBAL),
        "local_rope_theta": float(window.get("rope_theta") or config.get("rope_local_base_freq") or _LOCAL),
        "rope": None if kind == "default" else RopeOptions(kind="linear", factor=whole.get("factor")),
    }


def write(options: Gemma3Options) -> dict[str, Any]:
    scaling = None if options.rope is None else {"rope_type": options.rope.kind, "factor": options.rope.factor}
    return {
        **gemma.written_types(options),
        "rope_local_base_freq": options.local_rope_theta,
        "rope_scaling": scaling,
    }


FAMILY = Family(
    name="gemma3",
    summary="Gemma 3 (text): windows with a rotary base of their own, head norms",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "gemma3_text",
        "Gemma3ForCausalLM",
        settings=gemma.SETTINGS_OF_BOTH,
        defaults={**gemma.DEFAULTS_OF_BOTH, "rope_theta": _GLOBAL},
        exact={**gemma.EXACT_OF_BOTH, "attn_logit_softcapping": Only((None,))},
        read=read,
        write=write,
        own=frozenset({"layer_types", "rope_parameters", "rope_scaling"}),
    ),
    options=Gemma3Options,
    rotary=rotary,
    position=61,
)
