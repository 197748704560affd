"""The rotary settings of config.json, as transformers 4 and 5 write them.

Transformers 4 has `rope_theta` and `partial_rotary_factor` beside `rope_scaling`; a second base has
a key of its own. Transformers 5 has all of them in `rope_parameters`, once or per type of layer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from raypp.errors import JobError, Problem
from raypp.job.family import HfFormat
from raypp.job.models import DecoderOptions
from raypp.job.rope import NEEDED, TAKEN, RopeOptions
from raypp.state.hf.config_shape import scaling_errors
from raypp.untrusted.documents import described
from raypp.untrusted.text import visible

_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    **{
        name: name
        for name in (
            "attention_factor", "beta_fast", "beta_slow", "truncate", "low_freq_factor", "high_freq_factor",
            "short_factor", "long_factor",
        )
    },
}  # fmt: skip
"""Keys of the scaling and their fields."""
_MSCALE = ("mscale", "mscale_all_dim")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which frequencies turn by which of a position's three numbers; in texts these are equal."""
_SHOWN = 200
_SHARE = "partial_rotary_factor"


def source_of(config: Mapping[str, Any]) -> str:
    """Returns the key that transformers 5 reads: it prefers that of transformers 4."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def as_version_4(config: Mapping[str, Any], form: HfFormat) -> dict[str, Any]:
    """Returns a config.json with the rotary keys of transformers 4."""
    given = config.get(source_of(config))
    converted = {key: value for key, value in config.items() if key != "rope_parameters"}
    if not isinstance(given, Mapping):
        return {**converted, "rope_scaling": given}
    parts = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    if parts:
        main = _main(parts, form)
        if main is None:
            return {**converted, "rope_scaling": given}
        for name, key in form.rope_types.items():
            if name in parts and "rope_theta" in parts[name]:
                converted[key] = parts[name]["rope_theta"]
        given = main
    if "turned_share" in form.settings:  # zero frequencies, not dims that are left out
        still = _kind(given) == "proportional" and given.get("factor", 1.0) == 1.0
        given = {**given, _SHARE: given.get(_SHARE, 1.0) if still else 1.0}
        given = {**given, "rope_type": "default", "factor": None} if still else given
    lifted = {"rope_theta": form.settings["rope_theta"], _SHARE: _SHARE}
    converted |= {key: given[name] for name, key in lifted.items() if given.get(name) is not None}
    return {**converted, "rope_scaling": {name: value for name, value in given.items() if name not in lifted}}


def _main(parts: Mapping[str, Mapping[str, Any]], form: HfFormat) -> Mapping[str, Any] | None:
    """Returns the parameters of the layers that may be scaled; None if raypp has no such model."""
    if not form.rope_types:
        first, *others = parts.values()
        return first if all(other == first for other in others) else None
    main = next((name for name, key in form.rope_types.items() if key == form.settings["rope_theta"]), None)
    plain = all(_kind(part) == "default" for name, part in parts.items() if name != main)
    return parts.get(main or "") if plain and parts.keys() <= form.rope_types.keys() else None


def _kind(given: Mapping[str, Any]) -> str:
    return str(given.get("rope_type") or given.get("type") or "default")


def scaling_of(config: Mapping[str, Any], refused: str, more: Sequence[str] = ()) -> RopeOptions | None:
    """Returns the scaling in a config.json with the keys of transformers 4; None if there is none.
    `config`: the result of `as_version_4`. `refused`: what a message says first. `more`: keys that
    the family reads itself. Raises JobError: raypp does not compute it, or it is incomplete."""
    given = config.get("rope_scaling")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refusal(refused, "it is not a mapping")
    if errors := scaling_errors(given):
        raise _refusal(refused, errors[0])
    kind = _kind(given)
    unknown = sorted(given.keys() - {*_KEYS, *_MSCALE, *_OF_IMAGES, *more, "rope_type", "type"})
    if unknown:
        raise _refusal(refused, f"raypp does not know {visible(', '.join(unknown)[:_SHOWN])}")
    if kind == "default":
        return None
    if kind not in NEEDED:
        raise _refusal(refused, f"raypp has no such scaling; it has {', '.join(NEEDED)}")
    values = {_KEYS[name]: value for name, value in given.items() if name in _KEYS and value is not None}
    context = config.get("max_position_embeddings")
    if kind == "dynamic":
        if values.get("original_context", context) != context:
            raise _refusal(refused, "transformers takes max_position_embeddings for the original context")
        values["original_context"] = context
    elif kind != "linear":
        # Phi 3 has the original context beside the scaling, where it has priority.
        beside = config.get("original_max_position_embeddings")
        values["original_context"] = beside or values.get("original_context") or context
    original = values.get("original_context")
    implied = kind == "longrope" or (kind == "yarn" and "factor" in given)
    if "factor" not in values and implied and context and original:
        values["factor"] = context / original
    factor = values.get("factor")
    if kind == "yarn" and factor and "attention_factor" not in values and all(given.get(name) for name in _MSCALE):
        of_all, of_others = (0.1 * given[name] * math.log(max(factor, 1.0)) + 1 for name in _MSCALE)
        values["attention_factor"] = of_all / of_others if factor > 1 else 1.0
    used = {name: values[name] for name in (*NEEDED[kind], *TAKEN.get(kind, ())) if name in values}
    try:
        return RopeOptions.model_validate({"kind": kind, **used})
    except ValidationError as error:
        raise _refusal(refused, described(error.errors(include_url=False)[0])) from None


def _refusal(refused: str, why: str) -> JobError:
    return JobError(Problem("model.from_hf", f"{refused} is not supported: {why}", "use a model without it"))


def written_scaling(options: DecoderOptions, context: int) -> dict[str, Any]:
    """Returns the keys of the scaling in config.json, for transformers 4 and 5.
    max_position_embeddings is the original context of a dynamic scaling. Transformers 4 computes
    the factor of yarn and longrope from it, too. `options`: the `model:` section. `context`:
    longest sequence it was trained on, in tokens."""
    rope = options.rope
    if rope is None:
        return {"rope_scaling": None, "max_position_embeddings": context}
    fields = {field: key for key, field in _KEYS.items()}
    scaling = {"rope_type": rope.kind}
    scaling |= {
        fields[name]: value for name, value in rope.model_dump(mode="json", exclude_none=True).items() if name != "kind"
    }
    original = rope.original_context or context
    extended = round(original * rope.factor) if rope.factor else max(context, original)
    keys: dict[str, Any] = {"rope_scaling": scaling}
    if rope.kind == "dynamic":
        del scaling["original_max_position_embeddings"]
        return {**keys, "max_position_embeddings": original}
    if rope.kind == "longrope":
        keys["original_max_position_embeddings"] = original
    if rope.kind in ("yarn", "longrope"):
        return {**keys, "max_position_embeddings": extended}
    return {**keys, "max_position_embeddings": max(context, extended if rope.kind == "llama3" else context)}
