"""Converts between Hugging Face's `config.json` and the `model:` section.

Reads what transformers 4 and 5 write; writes keys that both read.

Families define their keys (`job.family.HfFormat`). Settings that raypp does not compute are refused
by name, never ignored.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from raypp.errors import JobError, Problem
from raypp.job.family import Family, HfFormat
from raypp.job.known_families import FAMILIES, family_of, layer_rotary
from raypp.job.models import DecoderOptions
from raypp.job.rope import rope_problems
from raypp.state.hf.config_shape import LARGEST, MOST_LAYERS, brief, fp8_problems, in_fp8, shape_problems
from raypp.state.hf.model_files import KEY
from raypp.state.hf.rope import as_version_4, scaling_of, source_of, written_scaling
from raypp.state.hf.text_config import NESTED, known_wholes, text_config
from raypp.untrusted.text import visible

OWN_KEYS = ("init_std", "aux_loss_weight", "z_loss_weight", "router_bias_rate", "lora", "max_context", "original")
"""Fields that a job may set together with `from_hf`: they belong to training, not to the model."""
_SHOWN = 200


def options_from_config(
    config: Mapping[str, Any], given: DecoderOptions, place: str, own_head: Callable[[], bool] = lambda: False
) -> DecoderOptions:
    """Returns the `model:` section with the sizes of a config.json. `given`: the section as
    written, with `from_hf`. Its sizes must equal those of config.json, but `vocab_size` may be
    larger. `own_head`: whether the files hold a head that is not the embedding. A model with one is
    not tied, whatever config.json says, as in transformers. Asked only if that says so. Raises
    JobError: lists everything that is missing, unsupported or contradicted by the section."""
    whole, config = config, dict(text_config(config))
    model_type = config.get("model_type")
    if problems := list(shape_problems(config, place)):
        raise JobError(problems)
    family = next((family for family in FAMILIES.values() if family.hf.model_type == model_type), None)
    if family is None:
        named = visible(", ".join(config.get("architectures") or [])[:_SHOWN]) or "no architecture"
        fault = f"{place}: model_type {brief(model_type)} ({named}) is not supported"
        if isinstance(whole.get(NESTED), dict):
            kind = brief(whole[NESTED].get("model_type"))
            fault += f": it is multimodal, with a text of model_type {kind}; raypp takes that of {known_wholes()}"
        types = sorted({family.hf.model_type for family in FAMILIES.values()})
        raise JobError(Problem(KEY, fault, f"use a model of text with one of these model_types: {', '.join(types)}"))
    if problems := list(fp8_problems(config, place)):
        raise JobError(problems)
    if in_fp8(config):
        del config["quantization_config"]
    rope_key = source_of(config)
    refused = f"{place}: {rope_key} {brief(config.get(rope_key))}"
    lifted = as_version_4(config, family.hf)
    moved = {key: f"{rope_key} {key}" for key in lifted.keys() - config.keys()}
    config = lifted | {key: config[newer] for key, newer in family.hf.newer.items() if newer in config}
    problems = [*_unsupported(config, family, moved, place), *_missing(config, family.hf, place)]
    try:
        scaling = scaling_of(config, refused, family.hf.rope_keys)
    except JobError as error:
        problems += error.problems
    if problems:
        raise JobError(problems)
    values = {"kind": family.name, "rope": scaling, **_values(config, family.hf)}
    if family.hf.read is not None:
        values |= family.hf.read(config, place)
    if "vocab_size" in given.model_fields_set:
        values["vocab_size"] = max(given.vocab_size, values["vocab_size"])
    if values["tie_embeddings"] and own_head():
        values["tie_embeddings"] = False
        if "tie_embeddings" in given.model_fields_set and given.tie_embeddings:
            fault = f"is true, as in {place}, but the files hold an lm_head.weight that is not the embedding"
            fix = "remove the key, and both are used; a run that began without that head needs another name"
            raise JobError(Problem("model.tie_embeddings", fault, fix))
    if contradictions := list(_contradictions(given, values, place)):
        raise JobError(contradictions)
    own = {name: getattr(given, name) for name in OWN_KEYS if name in given.model_fields_set}
    try:
        options = family.options(**values, **own, from_hf=given.from_hf)
    except ValidationError as error:
        raise JobError(_invalid(error, family.hf, place)) from None
    widths = {rotary.width for index in range(options.num_layers) if (rotary := layer_rotary(options, index))}
    if options.rope is not None and (
        problems := [*rope_problems(options.rope, min(widths, default=options.dim_per_head), "")]
    ):
        fix = "use a model without it"
        whats = [f"{refused} is not supported: {problem.key[1:]} {problem.fault}" for problem in problems]
        raise JobError(Problem(KEY, fault, fix) for fault in whats)
    return options


def config_from_options(
    options: DecoderOptions,
    *,
    dtype: str,
    context: int,
    eos_id: int | None,
    bos_id: int | None = None,
    pad_id: int | None = None,
) -> dict[str, Any]:
    """Returns the config.json of a model; `options_from_config` reads it back.

    Args:
        dtype: torch's name of the weights' dtype (`float32`).
        context: Longest sequence that it takes, in tokens.
        eos_id: Id of the end-of-text token; None if unknown.
        bos_id: Id of the token before a text; None if there is none.
        pad_id: Id of the padding; None if unknown.

    Raises:
        JobError: Transformers has no such family.
    """
    family = family_of(options)
    if family is None:
        fault = f"{options.kind} has no Hugging Face format"
        raise JobError(Problem("model.kind", fault, f"use one of: {', '.join(FAMILIES)}"))
    form = family.hf
    config: dict[str, Any] = {"architectures": [form.architecture], "model_type": form.model_type}
    config |= {key: only.values[-1] for key, only in form.exact.items() if only.written}
    config |= {
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "initializer_range": options.init_std,
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    config |= written_scaling(options, context)
    resolved = {"num_kv_heads": options.kv_heads, "head_dim": options.dim_per_head}
    for name, key in {**form.sizes, **form.settings, **form.training}.items():
        value = resolved.get(name, getattr(options, name))
        config[key] = list(value) if isinstance(value, tuple) else value
    if form.write is not None:
        more = form.write(options)
        if config["rope_scaling"] and form.rope_keys:
            more["rope_scaling"] = config["rope_scaling"] | more.pop("rope_scaling", {})
        config |= more
    if "rope_parameters" in config and (scaling := config.pop("rope_scaling")):  # per type of layer
        config["rope_parameters"]["full_attention"] |= scaling
    return dict(sorted(config.items()))


def _values(config: Mapping[str, Any], form: HfFormat) -> dict[str, Any]:
    values: dict[str, Any] = {name: config[key] for name, key in form.sizes.items()}
    for name, key in form.settings.items():
        values[name] = config[key] if key in config else form.defaults.get(name)
    # transformers takes null for no.
    values |= {name: False for name, default in form.defaults.items() if default is False and values.get(name) is None}
    values["num_kv_heads"] = values.get("num_kv_heads") or values["num_heads"]
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // values["num_heads"]
    values["rope_theta"] = float(values["rope_theta"] or form.defaults["rope_theta"])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _invalid(error: ValidationError, form: HfFormat, place: str) -> Iterator[Problem]:
    """Describes values that the section does not take, by the keys of config.json."""
    keys = {**form.sizes, **form.settings}
    for details in error.errors(include_url=False):
        if not details["loc"]:  # the values contradict each other
            fault = re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), details["msg"])
            yield Problem(KEY, f"{place}: {fault}", "check that this is the config.json of a language model")
            continue
        name = str(details["loc"][0])
        fault = f"{place}: {keys.get(name, name)} {brief(details['input'])} is not supported: {details['msg']}"
        yield Problem(KEY, fault, "check that this is the config.json of a language model")


def _unsupported(config: Mapping[str, Any], family: Family, moved: Mapping[str, str], place: str) -> Iterator[Problem]:
    fix = "use a model without it; raypp would compute something else"
    for key, only in family.hf.exact.items():
        if config.get(key) not in only.values:
            yield Problem(KEY, f"{place}: {moved.get(key, key)} {brief(config.get(key))} is not supported", fix)
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others and "layer_types" not in family.options.model_fields:
        yield Problem(KEY, f"{place}: layer_types {visible(', '.join(others)[:_SHOWN])} is not supported", fix)


def _missing(config: Mapping[str, Any], form: HfFormat, place: str) -> Iterator[Problem]:
    for key, name in {key: name for name, key in form.sizes.items()}.items():
        value = config.get(key)
        most = MOST_LAYERS if name == "num_layers" else LARGEST
        if isinstance(value, int) and value > most:
            fault = f"{place}: {key} is {brief(value)}; at most {most:,} are supported"
            yield Problem(KEY, fault, "check that this is the config.json of a language model")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            stated = "is missing" if key not in config else f"is {brief(value)}, not a positive integer"
            yield Problem(KEY, f"{place}: {key} {stated}", "check that this is the config.json of a language model")


def _contradictions(given: DecoderOptions, values: Mapping[str, Any], place: str) -> Iterator[Problem]:
    for name in sorted(given.model_fields_set - {"from_hf", *OWN_KEYS}):
        stated = getattr(given, name)
        if stated is None or name not in values:
            continue
        meant = values[name]
        if stated != meant:
            fix = f"remove the key (from_hf sets it), or write {brief(meant)}" + " or more" * (name == "vocab_size")
            yield Problem(f"model.{name}", f"is {brief(stated)}, but {place} says {brief(meant)}", fix)
