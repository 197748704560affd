"""Phi 3, 3.5 and 4: fused projections, a window, partial rotary encoding and longrope. The fused
matrices stay fused: they are one product, and adapters of PEFT have them as they are."""

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import (
    PARTIAL_EXACT,
    PARTIAL_SETTINGS,
    OneWindowOptions,
    PartialRotaryOptions,
    rotary,
)
from raypp.job.family import DEFAULTS, Family, HfFormat, Only


class Phi3Options(OneWindowOptions, PartialRotaryOptions):
    """Options of Phi 3."""


FAMILY = Family(
    name="phi3",
    summary="Phi 3, 3.5 mini and medium, Phi 4, Phi 4 mini: fused projections",
    layer=lambda options, index: Layer(fused_qkv=True, mlp="fused"),
    rotary=rotary,
    hf=HfFormat(
        "phi3",
        "Phi3ForCausalLM",
        settings={**PARTIAL_SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "rotary_share": 1.0},
        exact={**PARTIAL_EXACT, "embd_pdrop": Only((None, 0, 0.0)), "resid_pdrop": Only((None, 0, 0.0))},
    ),
    options=Phi3Options,
    position=70,
)
