"""OLMo 3: OLMo 2 with a window in three of four layers, which no rotary scaling reaches."""

from pydantic import Field

from raypp.job.families import layer_kinds, olmo2
from raypp.job.family import DEFAULTS, EXACT, SETTINGS, Family, HfFormat, Only
from raypp.job.models import WindowOptions
from raypp.job.rope import Rotary

_BASE = 500_000.0


class Olmo3Options(WindowOptions):
    """Options of OLMo 3. `rope_theta` and `rope` are those of layers without a window."""

    sliding_window: int | None = Field(default=4096, ge=1)
    """Tokens that a query of a layer with a window sees, itself included. null: no layer has one.
    """
    rope_theta: float = Field(default=_BASE, gt=0)
    """Base of the rotary position encoding; 500,000 in layers with a window."""

    full_every = 4


def rotary(options: Olmo3Options, index: int) -> Rotary:
    if options.slides(index):
        return Rotary(options.dim_per_head, _BASE)
    return Rotary(options.dim_per_head, options.rope_theta, options.rope)


FAMILY = Family(
    name="olmo3",
    summary="OLMo 3 (7B, 32B): OLMo 2 with windows in three of four layers",
    layer=olmo2.layer,
    rotary=rotary,
    hf=HfFormat(
        "olmo3",
        "Olmo3ForCausalLM",
        settings={**SETTINGS, "attention_bias": "attention_bias", "sliding_window": "sliding_window"},
        # In files, only `rope_parameters` has the base of layers with a window.
        rope_types={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
        defaults={**DEFAULTS, "norm_eps": 1e-5, "attention_bias": False, "rope_theta": _BASE, "sliding_window": 4096},
        exact={**EXACT, "rope_local_base_freq": Only((None, _BASE), written=False)},
        read=lambda config, _: layer_kinds.read_types(config, Olmo3Options.full_every),
        write=layer_kinds.write_types,
    ),
    options=Olmo3Options,
    position=60,
)
