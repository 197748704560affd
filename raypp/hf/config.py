"""Converts between Hugging Face's `config.json` and the `model:` section.

Each family defines the keys it has (`raypp.spec.family.HfFormat`). Settings that raypp does not
compute are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raypp.errors import JobError, Problem
from raypp.spec.families import FAMILIES, family_of
from raypp.spec.family import HfFormat
from raypp.spec.models import DecoderOptions

KEY = "model.from_hf"
OWN_KEYS = ("init_std", "aux_loss_weight", "z_loss_weight")
"""Fields that a job may set together with `from_hf`: they belong to training, not to the model."""


def options_from_config(config: Mapping[str, Any], given: DecoderOptions, place: str) -> DecoderOptions:
    """Returns the `model:` section with the sizes of a config.json.

    Args:
        config: The content of config.json.
        given: The section as written, with `from_hf`. Its sizes must equal those of config.json.
        place: The location of config.json, for messages.

    Raises:
        JobError: Lists everything that is missing, unsupported or contradicted by the section.
    """
    model_type = config.get("model_type")
    family = next((family for family in FAMILIES.values() if family.hf.model_type == model_type), None)
    if family is None:
        named = ", ".join(map(str, config.get("architectures") or [])) or "no architecture"
        what = f"{place}: model_type {model_type!r} ({named}) is not supported"
        raise JobError(Problem(KEY, what, f"use a model of one of these families: {', '.join(FAMILIES)}"))
    problems = [*_unsupported(config, family.hf, place), *_missing(config, family.hf, place)]
    if problems:
        raise JobError(problems)
    values = {"kind": family.name, **_values(config, family.hf)}
    if family.hf.read is not None:
        values |= family.hf.read(config, place)
    if contradictions := list(_contradictions(given, values, place)):
        raise JobError(contradictions)
    own = {name: getattr(given, name) for name in OWN_KEYS if name in given.model_fields_set}
    return family.options(**values, **own, from_hf=given.from_hf)


def config_from_options(options: DecoderOptions, *, dtype: str, context: int, eos_id: int | None) -> dict[str, Any]:
    """Returns the config.json of a model; `options_from_config` reads it back.

    Args:
        options: The `model:` section.
        dtype: torch's name of the weights' dtype (`float32`).
        context: Longest sequence it was trained on, in tokens.
        eos_id: Id of the end-of-text token; None if unknown.

    Raises:
        JobError: Transformers has no such family.
    """
    family = family_of(options)
    if family is None:
        what = f"{options.kind} has no Hugging Face format"
        raise JobError(Problem("model.kind", what, f"use one of: {', '.join(FAMILIES)}"))
    form = family.hf
    config: dict[str, Any] = {"architectures": [form.architecture], "model_type": form.model_type}
    config |= {key: only.values[-1] for key, only in form.exact.items() if only.written}
    config |= {
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "initializer_range": options.init_std,
        "max_position_embeddings": context,
        "pad_token_id": None,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    resolved = {"num_kv_heads": options.kv_heads, "head_dim": options.dim_per_head}
    for name, key in {**form.sizes, **form.settings, **form.training}.items():
        config[key] = resolved.get(name, getattr(options, name))
    if form.write is not None:
        config |= form.write(options)
    return dict(sorted(config.items()))


def _values(config: Mapping[str, Any], form: HfFormat) -> dict[str, Any]:
    values: dict[str, Any] = {name: config[key] for name, key in form.sizes.items()}
    for name, key in form.settings.items():
        values[name] = config[key] if key in config else form.defaults.get(name)
    values["num_kv_heads"] = values["num_kv_heads"] or values["num_heads"]
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_heads"]
    values["rope_theta"] = float(_rope(config, form).get("rope_theta") or form.defaults["rope_theta"])
    return values


def _rope(config: Mapping[str, Any], form: HfFormat) -> dict[str, Any]:
    """Returns the settings of rotary positions, from the keys of transformers 4 or 5."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get(form.settings["rope_theta"]), **scaling}


def _unsupported(config: Mapping[str, Any], form: HfFormat, place: str) -> Iterator[Problem]:
    fix = "use a model without it; raypp would compute something else"
    for key, only in form.exact.items():
        if config.get(key) not in only.values:
            yield Problem(KEY, f"{place}: {key} {config.get(key)!r} is not supported", fix)
    rope = _rope(config, form)
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", None):
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        if key not in form.own:
            yield Problem(KEY, f"{place}: {key} {config[key]!r} is not supported", fix)
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others and "layer_types" not in form.own:
        yield Problem(KEY, f"{place}: layer_types {', '.join(others)} is not supported", fix)


def _missing(config: Mapping[str, Any], form: HfFormat, place: str) -> Iterator[Problem]:
    for key in dict.fromkeys(form.sizes.values()):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            said = "is missing" if key not in config else f"is {value!r}, not a positive integer"
            yield Problem(KEY, f"{place}: {key} {said}", "check that this is the config.json of a language model")


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
                f"remove the key (from_hf sets it), or write {meant!r}",
            )
