"""Gemma 3, text only: windows in five of six layers, with a rotary base of their own."""

from dataclasses import replace

from pydantic import Field

from raypp.job.families import gemma, layer_kinds
from raypp.job.family import Family, HfFormat, Only
from raypp.job.rope import Rotary

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

    full_every = 6


def rotary(options: Gemma3Options, index: int) -> Rotary:
    if options.slides(index):
        return Rotary(options.dim_per_head, options.local_rope_theta)
    return Rotary(options.dim_per_head, options.rope_theta, options.rope)


FAMILY = Family(
    name="gemma3",
    summary="Gemma 3 (text): windows with a rotary base of their own, head norms",
    layer=lambda options, index: replace(gemma.LAYER, head_norms=True),
    hf=HfFormat(
        "gemma3_text",
        "Gemma3ForCausalLM",
        settings={**gemma.SETTINGS_OF_BOTH, "local_rope_theta": "rope_local_base_freq"},
        rope_types={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
        defaults={**gemma.DEFAULTS_OF_BOTH, "rope_theta": _GLOBAL, "local_rope_theta": _LOCAL},
        exact={**gemma.EXACT_OF_BOTH, "attn_logit_softcapping": Only((None,))},
        within=("gemma3",),
        text_defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
        read=lambda config, _: layer_kinds.read_types(config, Gemma3Options.full_every),
        write=layer_kinds.write_types,
    ),
    options=Gemma3Options,
    rotary=rotary,
    position=61,
)
