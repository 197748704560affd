"""Gemma 2: windows in every other layer, soft caps of scores and logits, norms around blocks."""

from dataclasses import replace

from pydantic import Field

from raypp.job.families import gemma, layer_kinds
from raypp.job.family import Family, HfFormat
from raypp.job.layer_rules import AttentionRule


class Gemma2Options(gemma.GemmaOptions):
    """Options of Gemma 2."""

    sliding_window: int | None = Field(default=4096, ge=1)
    """Tokens that a query of a layer with a window sees, itself included. null: no layer has one.
    """
    score_soft_cap: float | None = Field(default=50.0, gt=0)
    """Scores s of attention become cap · tanh(s / cap). null: no cap."""
    logit_soft_cap: float | None = Field(default=30.0, gt=0)
    """Logits l become cap · tanh(l / cap). null: no cap."""

    full_every = 2

    def attention_rule(self, index: int) -> AttentionRule:
        return replace(super().attention_rule(index), soft_cap=self.score_soft_cap)


FAMILY = Family(
    name="gemma2",
    summary="Gemma 2: windows, soft caps, norms around each block",
    layer=lambda options, index: gemma.LAYER,
    hf=HfFormat(
        "gemma2",
        "Gemma2ForCausalLM",
        settings={**gemma.SETTINGS_OF_BOTH, "score_soft_cap": "attn_logit_softcapping"},
        defaults={**gemma.DEFAULTS_OF_BOTH, "score_soft_cap": 50.0, "logit_soft_cap": 30.0},
        exact=gemma.EXACT_OF_BOTH,
        read=lambda config, _: layer_kinds.read_types(config, Gemma2Options.full_every),
        write=layer_kinds.write_types,
    ),
    options=Gemma2Options,
    position=60,
)
