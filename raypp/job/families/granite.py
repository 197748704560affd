"""Granite 3: Llama with constant factors of embeddings, scores, residuals and logits."""

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.family import BIASES, DEFAULTS, EXACT, SETTINGS, Family, HfFormat
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import DecoderOptions, StageEnds


class GraniteOptions(DecoderOptions):
    """Options of Granite."""

    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    attention_multiplier: float = 1.0
    """Factor of the scores of attention, instead of head width ** -0.5."""
    residual_multiplier: float = 1.0
    """Factor of what each block adds to the residual stream."""
    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by it."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(scale=self.attention_multiplier)

    def stage_ends(self) -> StageEnds:
        return StageEnds(self.embedding_multiplier, logit_divisor=self.logits_scaling)


def layer(options: GraniteOptions, index: int) -> Layer:
    return Layer(
        qkv_bias=options.attention_bias,
        out_bias=options.attention_bias,
        mlp_bias=options.mlp_bias,
        residual_scale=options.residual_multiplier,
    )


_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FAMILY = Family(
    name="granite",
    summary="Granite 3.0 to 3.3 (2B, 8B): Llama with constant factors",
    layer=layer,
    hf=HfFormat(
        "granite",
        "GraniteForCausalLM",
        settings={**SETTINGS, **BIASES, **{name: name for name in _FACTORS}},
        defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False, **dict.fromkeys(_FACTORS, 1.0)},
        exact=EXACT,
    ),
    options=GraniteOptions,
    position=90,
)
