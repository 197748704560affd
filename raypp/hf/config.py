"""Hugging Face's `config.json` and the `model:` section: one read from the other, in both directions.

What raypp's families do not compute is refused by name, never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypp.errors import JobError, Problem
from raypp.spec.models import MODELS, DecoderOptions, MoeOptions

KEY = "model.from_hf"


@dataclass(frozen=True)
class _Family:
    """How a family's config.json differs from Llama's.

    Attributes:
        architecture: The class that transformers makes of it.
        defaults: Of keys that may be missing, as in transformers' own class.
        exact: Keys with the only values that raypp computes; None stands for a missing key.
        renamed: Fields of the section whose key is not the usual one.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


_NO = (None, False)
FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", exact={"attention_bias": _NO, "mlp_bias": _NO, "pretraining_tp": (None, 1)}),
    "qwen2": _Family("Qwen2ForCausalLM", exact={"use_sliding_window": _NO}),
    "qwen3": _Family(
        "Qwen3ForCausalLM", {"head_dim": 128}, {"attention_bias": _NO, "use_sliding_window": _NO}
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        exact={
            "attention_bias": _NO, "use_sliding_window": _NO, "norm_topk_prob": (True,),
            "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, []),
        },
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        {"sliding_window": (None,)},
        {"num_experts": "num_local_experts", "expert_ffn_size": "intermediate_size"},
    ),
}  # fmt: skip
"""By `model_type`, which is also `model.kind`."""

_EXACT: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_dropout": (None, 0, 0.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "tie_embeddings": ("tie_word_embeddings", False),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
}
OWN_KEYS = ("init_std", "aux_loss_weight", "z_loss_weight")
"""Fields that stay the job's own beside `from_hf`: they say how to train, not what the model is."""


def options_from_config(config: Mapping[str, Any], given: DecoderOptions, place: str) -> DecoderOptions:
    """The `model:` section with the sizes of a config.json.

    Args:
        config: The content of config.json.
        given: The section as it was written, with `from_hf`. What it says of sizes must be what config.json says.
        place: Of config.json, for messages.

    Raises:
        JobError: With everything that is missing, unsupported, or different in the section.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        named = ", ".join(map(str, config.get("architectures") or [])) or "no architecture"
        what = f"{place}: model_type {kind!r} ({named}) is not supported"
        raise JobError(Problem(KEY, what, f"there are: {', '.join(FAMILIES)}"))
    problems = [*_unsupported(config, family, place), *_missing(config, family, place)]
    if problems:
        raise JobError(problems)
    values = _values(config, family, str(kind))
    if contradictions := list(_contradictions(given, values, place)):
        raise JobError(contradictions)
    own = {name: getattr(given, name) for name in OWN_KEYS if name in given.model_fields_set}
    options: type[DecoderOptions] = MODELS.get(str(kind)).options or DecoderOptions
    return options(**values, **own, from_hf=given.from_hf)


def config_from_options(options: DecoderOptions, *, dtype: str, context: int, eos_id: int | None) -> dict[str, Any]:
    """The config.json of a model; `options_from_config` reads it back.

    Args:
        options: The `model:` section.
        dtype: torch's name of the weights' dtype (`float32`).
        context: Longest sequence it was trained on, in tokens.
        eos_id: Id that ends a text, when it is known.

    Raises:
        JobError: Transformers has no such family.
    """
    family = FAMILIES.get(options.kind)
    if family is None:
        what = f"{options.kind} is not a family that Hugging Face's format has a name for"
        raise JobError(Problem("model.kind", what, f"there are: {', '.join(FAMILIES)}"))
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": options.kind}
    names = {**_REQUIRED, **{name: key for name, (key, _) in _OPTIONAL.items()}}
    if isinstance(options, MoeOptions):
        names |= _EXPERTS
        config["router_aux_loss_coef"] = options.aux_loss_weight
    for name, key in names.items():
        if name == "ffn_size" and "expert_ffn_size" in family.renamed:
            continue
        config[family.renamed.get(name, key)] = getattr(options, name)
    config |= {"num_key_value_heads": options.kv_heads, "head_dim": options.dim_per_head}
    # The only values there are: the first, or the second where the first stands for a missing key.
    config |= {key: values[-1] for key, values in {**_EXACT, **family.exact}.items() if values != (None,)}
    config |= {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "initializer_range": options.init_std,
        "max_position_embeddings": context,
        "pad_token_id": None,
        "rope_scaling": None,
        "rope_theta": options.rope_theta,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if "sliding_window" in family.exact:
        config["sliding_window"] = None
    config.pop("partial_rotary_factor")
    return dict(sorted(config.items()))


def _values(config: Mapping[str, Any], family: _Family, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {"kind": kind}
    values |= {name: config[key] for name, key in _REQUIRED.items()}
    for name, (key, default) in _OPTIONAL.items():
        values[name] = config[key] if key in config else family.defaults.get(key, default)
    values["num_kv_heads"] = values["num_kv_heads"] or values["num_heads"]
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_heads"]
    values["rope_theta"] = float(_rope(config).get("rope_theta") or family.defaults.get("rope_theta", 10000.0))
    if MODELS.get(kind).options is MoeOptions:
        values |= {name: config[family.renamed.get(name, key)] for name, key in _EXPERTS.items()}
    return values


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of rotary positions, by the key of transformers 4 or that of 5."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta"), **scaling}


def _unsupported(config: Mapping[str, Any], family: _Family, place: str) -> Iterator[Problem]:
    fix = "use a model without it; raypp would compute something else"
    for key, allowed in {**_EXACT, **family.exact}.items():
        if config.get(key) not in allowed:
            yield Problem(KEY, f"{place}: {key} {config.get(key)!r} is not supported", fix)
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", None):
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        yield Problem(KEY, f"{place}: {key} {config[key]!r} is not supported", fix)
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others:
        yield Problem(KEY, f"{place}: layer_types {', '.join(others)} is not supported", fix)


def _missing(config: Mapping[str, Any], family: _Family, place: str) -> Iterator[Problem]:
    wanted = list(_REQUIRED.values())
    if MODELS.get(str(config["model_type"])).options is MoeOptions:
        wanted += [family.renamed.get(name, key) for name, key in _EXPERTS.items()]
    for key in dict.fromkeys(wanted):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            said = "is missing" if key not in config else f"is {value!r}, not a size"
            yield Problem(KEY, f"{place}: {key} {said}", "is it the config.json of a language model?")


def _contradictions(given: DecoderOptions, values: Mapping[str, Any], place: str) -> Iterator[Problem]:
    for name in sorted(given.model_fields_set - {"from_hf", *OWN_KEYS}):
        said = getattr(given, name)
        if said is None or name not in values:
            continue
        meant = values[name]
        if said != meant:
            yield Problem(
                f"model.{name}",
                f"is {said!r}, but {place} says {meant!r}",
                f"leave the key out beside from_hf, or write {meant!r}",
            )
