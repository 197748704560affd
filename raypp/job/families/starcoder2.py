"""StarCoder 2: LayerNorm, a feed-forward block without a gate, biases everywhere, a window."""

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import OneWindowOptions
from raypp.job.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only
from raypp.job.models import StageEnds


class Starcoder2Options(OneWindowOptions):
    """Options of StarCoder 2."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    use_bias: bool = True
    """Biases on the projections of attention and of the feed-forward block."""

    def stage_ends(self) -> StageEnds:
        return StageEnds(layer_norm=True)


def layer(options: Starcoder2Options, index: int) -> Layer:
    return Layer(qkv_bias=options.use_bias, out_bias=options.use_bias, mlp="plain", mlp_bias=options.use_bias)


_NO_DROPOUT = Only((None, 0, 0.0))
FAMILY = Family(
    name="starcoder2",
    summary="StarCoder 2 (3B, 7B, 15B): LayerNorm, a feed-forward block without a gate",
    layer=layer,
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
