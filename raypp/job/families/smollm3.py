"""SmolLM 3: Llama of which every fourth layer has no rotary encoding."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from raypp.job.families import llama
from raypp.job.family import BIASES, DEFAULTS, EXACT, NO, SETTINGS, Family, HfFormat, whole_heads
from raypp.job.models import DecoderOptions
from raypp.job.rope import Rotary

_INTERVAL = 4


class SmolLM3Options(DecoderOptions):
    """Options of SmolLM 3."""

    rotary_layers: tuple[bool, ...] | None = None
    """Whether each layer has the rotary encoding. null: all but every fourth."""

    @model_validator(mode="after")
    def _one_per_layer(self) -> Self:
        if self.rotary_layers is not None and len(self.rotary_layers) != self.num_layers:
            raise ValueError(f"rotary_layers has {len(self.rotary_layers)} entries for num_layers {self.num_layers}")
        return self

    def rotates(self) -> tuple[bool, ...]:
        """Returns whether each layer has the rotary encoding."""
        return self.rotary_layers or _every(_INTERVAL, self.num_layers)


def _every(interval: int, layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % interval != 0 for index in range(layers))


def rotary(options: SmolLM3Options, index: int) -> Rotary | None:
    listed = options.rotary_layers
    rotates = (index + 1) % _INTERVAL != 0 if listed is None else listed[index]
    return whole_heads(options, index) if rotates else None


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns which layers have the rotary encoding; null where they follow the usual pattern."""
    layers = config["num_hidden_layers"]
    listed = config.get("no_rope_layers")
    flags = _every(config.get("no_rope_layer_interval") or _INTERVAL, layers) if listed is None else map(bool, listed)
    rotates = tuple(flags)[:layers]
    return {"rotary_layers": None if rotates == _every(_INTERVAL, layers) else rotates}


def write(options: SmolLM3Options) -> dict[str, Any]:
    """Returns the layers for config.json: 1 where there is a rotary encoding."""
    return {"no_rope_layers": [int(rotates) for rotates in options.rotates()]}


FAMILY = Family(
    name="smollm3",
    summary="SmolLM 3 (3B): Llama with layers without rotary encoding",
    layer=llama.layer,
    rotary=rotary,
    hf=HfFormat(
        "smollm3",
        "SmolLM3ForCausalLM",
        settings={**SETTINGS, **BIASES},
        defaults={
            **DEFAULTS,
            "tie_embeddings": True,
            "rope_theta": 2e6,
            "num_kv_heads": 4,
            "attention_bias": False,
            "mlp_bias": False,
        },
        exact={**EXACT, "use_sliding_window": NO},
        read=read,
        write=write,
    ),
    options=SmolLM3Options,
    position=80,
)
