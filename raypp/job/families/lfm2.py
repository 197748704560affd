"""LFM2: gated short convolutions instead of attention in most layers."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import FULL, pattern
from raypp.job.family import EXACT, NO, SETTINGS, Family, HfFormat, whole_heads
from raypp.job.layer_rules import ShortConvolution
from raypp.job.models import DecoderOptions, StageEnds
from raypp.job.rope import Rotary

_CONV = "conv"
_EVERY = 3


class Lfm2Options(DecoderOptions):
    """Options of LFM2."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    layer_types: tuple[Literal["full_attention", "conv"], ...] | None = None
    """The kind of each layer. null: every third layer has attention."""
    conv_kernel: int = Field(default=3, ge=2, le=64)
    """Tokens that the causal convolution reads, the newest included."""

    def state_rule(self, index: int) -> ShortConvolution | None:
        full = (index + 1) % _EVERY == 0 if self.layer_types is None else self.layer_types[index] == FULL
        return None if full else ShortConvolution(self.hidden_size, self.conv_kernel)

    def stage_ends(self) -> StageEnds:
        return StageEnds(norm_name="embedding_norm")


LAYER = Layer(
    head_norms=True,
    head_norm_names=("q_layernorm", "k_layernorm"),
    out_name="out_proj",
    norms=("operator_norm", None, "ffn_norm", None),
    mlp_name="feed_forward",
    matrices=("w1", "w3", "w2"),
)


def rotary(options: Lfm2Options, index: int) -> Rotary | None:
    return whole_heads(options, index) if options.state_rule(index) is None else None


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the kinds of layers, null if they follow the pattern, and the inner width, which is
    two thirds of intermediate_size, rounded up, unless config.json says otherwise."""
    count, inner = config["num_hidden_layers"], config["intermediate_size"]
    kinds, full = config.get("layer_types"), config.get("full_attn_idxs")
    if kinds is None:
        kinds = [FULL if full is None or index in full else _CONV for index in range(count)]
    if config.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = config.get("block_multiple_of", 256)
            inner = -(-int(factor * inner) // multiple) * multiple
    return {"layer_types": None if kinds == pattern(count, _EVERY, _CONV) else tuple(kinds), "ffn_size": inner}


def layer_types(options: Lfm2Options) -> dict[str, Any]:
    rules = map(options.state_rule, range(options.num_layers))
    return {"layer_types": [FULL if rule is None else _CONV for rule in rules]}


def write(options: Lfm2Options) -> dict[str, Any]:
    return {**layer_types(options), "block_auto_adjust_ff_dim": False}


FAMILY = Family(
    name="lfm2",
    summary="LFM2 (350M to 2.6B): gated short convolutions, attention in some layers",
    layer=lambda options, index: LAYER,
    hf=HfFormat(
        "lfm2",
        "Lfm2ForCausalLM",
        settings={**SETTINGS, "norm_eps": "norm_eps", "conv_kernel": "conv_L_cache"},
        defaults={"norm_eps": 1e-5, "num_kv_heads": 8, "rope_theta": 1e6, "tie_embeddings": True, "conv_kernel": 3},
        exact={**{key: EXACT[key] for key in ("partial_rotary_factor", "quantization_config")}, "conv_bias": NO},
        newer={"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
        read=read,
        write=write,
    ),
    options=Lfm2Options,
    rotary=rotary,
    position=44,
)
