"""The types of the keys of config.json that raypp computes with before the `model:` section, and
what its `quantization_config` says of weights in FP8 (`hf.tensor`)."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from raypp.errors import Problem
from raypp.job.limits import LAYERS
from raypp.state.hf.tensor import FP8_BLOCK
from raypp.untrusted.documents import described

MOST_LAYERS = LAYERS
LARGEST = 2**31 - 1
_PROBLEMS = 5
_LEVELS, _ITEMS, _SHOWN = 3, 32, 300
_FIX = "check that this is the config.json of a language model"

_QUANTISED = "quantization_config"
_IN_FP8: dict[str, tuple[Any, ...]] = {
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    "activation_scheme": (None, "dynamic"),
    "fmt": (None, "e4m3"),
}
_FREE_IN_FP8 = ("quant_method", "modules_to_not_convert", "dequantize", "scale_fmt")
"""Keys that do not change what weights mean; which of them are in FP8 their tensors say."""

_Real = Annotated[float, Ge(-1e30), Le(1e30)]
_Positive = Annotated[float, Gt(0), Le(1e30)]
_Tokens = Annotated[float, Ge(0), Le(LARGEST)]
_Whole = Annotated[int, Ge(0), Le(LARGEST)]
_Interval = Annotated[int, Ge(1), Le(LARGEST)]
_Kinds = Annotated[list[str], MaxLen(MOST_LAYERS)]
_Indices = Annotated[list[int], MaxLen(MOST_LAYERS)]


@with_config(ConfigDict(extra="ignore", allow_inf_nan=False))
class _Config(TypedDict, total=False):
    architectures: list[str] | None
    head_dim: _Tokens | None
    num_key_value_heads: _Tokens | None
    rope_theta: _Positive | None
    rope_local_base_freq: _Positive | None
    partial_rotary_factor: _Real | None
    max_position_embeddings: _Tokens | None
    original_max_position_embeddings: _Tokens | None
    layer_types: _Kinds | None
    mlp_only_layers: _Indices | None
    no_rope_layers: _Indices | None
    full_attn_idxs: _Indices | None
    block_multiple_of: _Interval
    block_ffn_dim_multiplier: _Real | None
    block_auto_adjust_ff_dim: bool
    no_rope_layer_interval: _Interval | None
    sliding_window_pattern: _Interval | None
    max_window_layers: _Whole | None
    quantization_config: dict[str, Any] | None


@with_config(ConfigDict(extra="ignore", allow_inf_nan=False))
class _Scaling(TypedDict, total=False):
    rope_type: str | None
    type: str | None
    factor: _Positive | None
    original_max_position_embeddings: _Tokens | None
    mscale: _Tokens | None
    mscale_all_dim: _Tokens | None
    llama_4_scaling_beta: _Tokens | None


def shape_problems(config: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yields the keys whose values have a wrong type or size, with the location of config.json."""
    for error in _errors(_Config, config):
        yield Problem("model.from_hf", f"{place}: {error}", _FIX)


def scaling_errors(scaling: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the numbers of a rotary scaling."""
    return _errors(_Scaling, scaling)


def in_fp8(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are in FP8."""
    given = config.get(_QUANTISED)
    return isinstance(given, Mapping) and given.get("quant_method") == "fp8"


def fp8_problems(config: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Finds what raypp does not read of weights in FP8; nothing if they are not."""
    given = config[_QUANTISED] if in_fp8(config) else {}
    values = {
        **dict.fromkeys(_IN_FP8 if given else ()),
        **{key: given[key] for key in given if key not in _FREE_IN_FP8},
    }
    for key, value in values.items():
        known = _IN_FP8.get(key, (None,))
        if value not in known:
            fault = f"{place}: {_QUANTISED}.{key} {brief(value)} of weights in FP8 is not supported"
            meant = f"with {brief(known[-1])}" if key in _IN_FP8 else "without it"
            yield Problem("model.from_hf", fault, f"use a model {meant}, or one in bf16")


def brief(value: Any) -> str:
    """Formats a value of config.json as `repr`, truncated if long."""
    text = repr(_cut(value, _LEVELS))
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _cut(value: Any, levels: int) -> Any:
    """Returns a part of a value that is not deeper, and not much longer, than what is shown."""
    if isinstance(value, str):
        return value[:_SHOWN]
    if not isinstance(value, dict | list | tuple):
        return value
    if not levels:
        return ...
    if isinstance(value, dict):
        return {key[:_SHOWN]: _cut(inner, levels - 1) for key, inner in islice(value.items(), _ITEMS)}
    return type(value)(_cut(inner, levels - 1) for inner in value[:_ITEMS])


def _errors(shape: Any, value: Mapping[str, Any]) -> list[str]:
    try:
        _adapter(shape).validate_python(dict(value), strict=True)
    except ValidationError as error:
        return [described(details) for details in error.errors(include_url=False, include_context=False)[:_PROBLEMS]]
    return []


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)
