"""StarCoder 2: LayerNorm, a feed-forward block without a gate, biases everywhere, a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from raypp.families import weights
from raypp.spec.attention_rule import AttentionRule
from raypp.spec.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only, Weight
from raypp.spec.models import DecoderOptions, StageEnds

if TYPE_CHECKING:
    from raypp.models.layers import DecoderLayer


class Starcoder2Options(DecoderOptions):
    """Options of StarCoder 2."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    use_bias: bool = True
    """Biases on the projections of attention and of the feed-forward block."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included. null: no limit."""

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window)

    def stage_ends(self) -> StageEnds:
        return StageEnds(layer_norm=True)


def layer_weights(options: Starcoder2Options, index: int) -> list[Weight]:
    biased = options.use_bias
    attention = weights.attention(options, qkv_bias=biased, out_bias=biased)
    return [*attention, *weights.layer_norms(options, bias=True), *weights.plain(options, bias=biased)]


def build_layer(options: Starcoder2Options, index: int) -> DecoderLayer:
    from raypp.models.layers import Attention, DecoderLayer, LayerNorm, PlainFeedForward

    biased = options.use_bias
    attention = Attention(options, qkv_bias=biased, out_bias=biased, rule=options.attention_rule(index))
    feed_forward = PlainFeedForward(options.hidden_size, options.ffn_size, bias=biased)
    return DecoderLayer(options, attention, feed_forward, norm=LayerNorm)


_NO_DROPOUT = Only((None, 0, 0.0))
FAMILY = Family(
    name="starcoder2",
    summary="StarCoder 2 (3B, 7B, 15B): LayerNorm, a feed-forward block without a gate",
    weights=layer_weights,
    layer=build_layer,
    hf=HfFormat(
        "starcoder2",
        "Starcoder2ForCausalLM",
        settings={**SETTINGS, "norm_eps": "norm_epsilon", "use_bias": "use_bias", "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "num_kv_heads": 2, "tie_embeddings": True, "use_bias": True},
        exact={
            **EXACT,
            "hidden_act": Only((None, "gelu_pytorch_tanh")),
            "residual_dropout": _NO_DROPOUT,
            "embedding_dropout": _NO_DROPOUT,
        },
    ),
    options=Starcoder2Options,
    position=110,
)
