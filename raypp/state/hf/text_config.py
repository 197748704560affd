"""The config of the text of a multimodal model, which transformers keeps in `text_config`."""

from collections.abc import Mapping
from typing import Any

from raypp.job.known_families import FAMILIES

NESTED = "text_config"
_OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
_TIED = "tie_word_embeddings"
_OUTSIDE = (_TIED, "dtype", "torch_dtype")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a model's text: config.json itself, if the model is nothing else. Also
    itself, if no family is the text of such a model: then its model_type is refused."""
    inner = config.get(NESTED)
    if not isinstance(inner, Mapping):
        return dict(config)
    for family in FAMILIES.values():
        if inner.get("model_type") == family.hf.model_type and config.get("model_type") in family.hf.within:
            whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
            # transformers asks the whole whether the head is tied, and takes a missing key for yes.
            tied = {family.hf.settings["tie_embeddings"]: config.get(_TIED, True)}
            return {**family.hf.text_defaults, **inner, **whole, **tied}
    return dict(config)


def multimodal(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a multimodal model whose text is one of raypp's families."""
    return config.get("model_type") != text_config(config).get("model_type")


def known_wholes() -> str:
    """Returns the model_types whose text raypp takes, in words."""
    wholes = [f"{whole} ({family.hf.model_type})" for family in FAMILIES.values() for whole in family.hf.within]
    return ", ".join(sorted(wholes))


def with_text_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with other values of its text: in place, or as new keys of the text."""
    if not multimodal(config):
        return {**config, **changes}
    text = {**config, **text_config(config)}
    changes = {key: value for key, value in changes.items() if key not in text or text[key] != value}
    outside = {key: value for key, value in changes.items() if key in config or key in _OUTSIDE}
    inside = {key: value for key, value in changes.items() if key in config[NESTED] or key not in outside}
    return {**config, **outside, NESTED: {**config[NESTED], **inside}}
