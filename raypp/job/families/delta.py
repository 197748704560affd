"""What families share that mix the gated delta rule with full attention: Qwen3-Next and Qwen3.5."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raypp.job import limits
from raypp.job.decoder_layer import Layer
from raypp.job.families.layer_kinds import FULL, PARTIAL_EXACT, PARTIAL_SETTINGS, PartialRotaryOptions, pattern
from raypp.job.families.layer_kinds import rotary as partial_rotary
from raypp.job.family import DEFAULTS
from raypp.job.layer_rules import DeltaRule
from raypp.job.models import StageEnds
from raypp.job.rope import Rotary

LINEAR = "linear_attention"
_EVERY = 4


class DeltaOptions(PartialRotaryOptions):
    """Options of families with the gated delta rule in most layers."""

    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] | None = None
    """The kind of each layer. null: every fourth layer has full attention."""
    linear_num_key_heads: int = Field(default=2, ge=1, le=limits.WIDTH)
    """Heads of queries and keys of the delta rule."""
    linear_num_value_heads: int = Field(default=4, ge=1, le=limits.WIDTH)
    """Heads of values of the delta rule; a multiple of linear_num_key_heads."""
    linear_key_head_dim: int = Field(default=32, ge=1, le=limits.WIDTH)
    """Width of a key head of the delta rule."""
    linear_value_head_dim: int = Field(default=32, ge=1, le=limits.WIDTH)
    """Width of a value head of the delta rule."""
    linear_conv_kernel_dim: int = Field(default=4, ge=2, le=64)
    """Tokens that the causal convolution reads, the newest included."""
    rotary_share: float = Field(default=0.25, gt=0, le=1)
    """Share of each head's dims that have the rotary encoding."""

    def state_rule(self, index: int) -> DeltaRule | None:
        full = (index + 1) % _EVERY == 0 if self.layer_types is None else self.layer_types[index] == FULL
        heads = self.linear_num_key_heads, self.linear_num_value_heads
        dims = self.linear_key_head_dim, self.linear_value_head_dim
        return None if full else DeltaRule(*heads, *dims, self.linear_conv_kernel_dim)

    def stage_ends(self) -> StageEnds:
        return StageEnds(gain_from_zero=True)

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            fault = f"cannot be split evenly over linear_num_key_heads {self.linear_num_key_heads}"
            raise ValueError(f"linear_num_value_heads {self.linear_num_value_heads} {fault}")
        return self


def rotary(options: DeltaOptions, index: int) -> Rotary | None:
    return None if options.state_rule(index) is not None else partial_rotary(options, index)


def layer(options: DeltaOptions, **other: Any) -> Layer:
    bias = options.attention_bias
    return Layer(qkv_bias=bias, out_bias=bias, head_norms=True, output_gate=True, **other)


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the kinds of layers; null if they follow the pattern."""
    count, every = config["num_hidden_layers"], config.get("full_attention_interval") or _EVERY
    kinds = config.get("layer_types") or pattern(count, every, LINEAR)
    return {"layer_types": None if kinds == pattern(count, _EVERY, LINEAR) else tuple(kinds)}


def write(options: DeltaOptions) -> dict[str, Any]:
    kinds = (options.state_rule(index) for index in range(options.num_layers))
    return {"layer_types": [FULL if kind is None else LINEAR for kind in kinds]}


_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SETTINGS = {**PARTIAL_SETTINGS, "attention_bias": "attention_bias", **{name: name for name in _DELTA}}
DELTA_DEFAULTS = {
    **DEFAULTS,
    "head_dim": 256,
    "num_kv_heads": 2,
    "attention_bias": False,
    "rotary_share": 0.25,
    **_DELTA,
}
DELTA_EXACT = PARTIAL_EXACT
