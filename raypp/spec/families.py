"""The registry of model families: `model.kind` -> what the family declares.

Every module of `raypp.families` that has a `FAMILY` is found by itself. Its builder and its layers are imported when
they are used: reading a job needs no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from raypp.registry import Registry
from raypp.spec.family import Family
from raypp.spec.models import CustomOptions, DecoderOptions

_PACKAGE = "raypp.families"


def _declared() -> Iterator[Family]:
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if family is not None:
            yield family


FAMILIES: dict[str, Family] = {
    family.name: family for family in sorted(_declared(), key=lambda family: (family.position, family.name))
}
"""By `model.kind`."""

MODELS = Registry("model")
for _family in FAMILIES.values():
    MODELS.register(_family.name, _family.builder, options=_family.options, summary=_family.summary)


def family_of(options: DecoderOptions) -> Family | None:
    """The family of a `model:` section; None for a user's own factory, which declares nothing."""
    return FAMILIES.get(options.kind)


def family_options() -> list[type[DecoderOptions]]:
    """The options classes of all families: every decoder's first, then those that add keys to it."""
    return [options for options in _CLASSES.values() if options is not CustomOptions]


def kinds_with(options: type[DecoderOptions]) -> list[str]:
    """The kinds whose `model:` section has this class."""
    return [family.name for family in FAMILIES.values() if family.options is options]


def model_options(value: Any) -> type[DecoderOptions]:
    """The options class of a `model:` section (a mapping, or options)."""
    return _CLASSES[_class_name(value)]


def _class_name(value: Any) -> str:
    """Which options class a `model:` section belongs to; an unknown kind gets the plain decoder's,
    so that its other keys are still checked (the kind itself is refused by `spec.checks`)."""
    kind = value.get("kind", "llama") if isinstance(value, dict) else getattr(value, "kind", "llama")
    if not isinstance(kind, str):
        return DecoderOptions.__name__
    if kind in FAMILIES:
        return FAMILIES[kind].options.__name__
    return (CustomOptions if ":" in kind else DecoderOptions).__name__


_OPTIONS: list[type[DecoderOptions]] = [
    DecoderOptions,
    *(family.options for family in FAMILIES.values()),
    CustomOptions,
]
_CLASSES = {options.__name__: options for options in _OPTIONS}

if TYPE_CHECKING:
    ModelSection = DecoderOptions
else:
    ModelSection = Annotated[
        Union[tuple(Annotated[cls, Tag(name)] for name, cls in _CLASSES.items())],  # noqa: UP007 - made from a tuple
        Discriminator(_class_name),
    ]
