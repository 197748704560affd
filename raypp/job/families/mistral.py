"""Mistral: Llama whose queries may see a window of tokens only."""

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import OneWindowOptions
from raypp.job.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat


class MistralOptions(OneWindowOptions):
    """Options of Mistral."""


FAMILY = Family(
    name="mistral",
    summary="Mistral: Llama with a window, or without",
    layer=lambda options, index: Layer(),
    hf=HfFormat(
        "mistral",
        "MistralForCausalLM",
        settings={**SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "sliding_window": 4096},
        exact=EXACT,
        within=("mistral3",),
    ),
    options=MistralOptions,
    position=55,
)
