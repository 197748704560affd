"""The registry of model families: maps `model.kind` to what the family declares. Finds every module
of `raypp.job.families` that has a `FAMILY`. A family's builder and layers are imported on first
use: reading a job needs no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from raypp.job.family import Family, whole_heads
from raypp.job.models import CustomOptions, DecoderOptions
from raypp.job.rope import Rotary
from raypp.registry import Kind, Registry

_PACKAGE = "raypp.job.families"


def _declared() -> Iterator[Family]:
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if family is not None:
            yield family


FAMILIES: dict[str, Family] = {
    family.name: family for family in sorted(_declared(), key=lambda family: (family.position, family.name))
}
"""The families by `model.kind`."""

MODELS = Registry("model", Kind, kinds=FAMILIES.values())


def family_of(options: DecoderOptions) -> Family | None:
    """Returns the family of a `model:` section; None for a user's own factory."""
    return FAMILIES.get(options.kind)


def counted_family(options: DecoderOptions) -> Family:
    """Returns the family by whose sizes a model is planned: for a user's own factory, llama."""
    return family_of(options) or FAMILIES["llama"]


def layer_rotary(options: DecoderOptions, index: int) -> Rotary | None:
    """Returns what the layer with a global index rotates queries and keys by; None for nothing. A
    user's own factory has whole heads in all layers."""
    family = family_of(options)
    return (family.rotary if family is not None else whole_heads)(options, index)


def family_options() -> list[type[DecoderOptions]]:
    """Returns the options classes of all families, that of every decoder first."""
    return [options for options in _CLASSES.values() if options is not CustomOptions]


def kinds_with(options: type[DecoderOptions]) -> list[str]:
    """Returns the kinds whose `model:` section has this class."""
    return [family.name for family in FAMILIES.values() if family.options is options]


def model_options(value: Any) -> type[DecoderOptions]:
    """Returns the options class of a `model:` section, given as a mapping or as options."""
    return _CLASSES[_class_name(value)]


def _class_name(value: Any) -> str:
    """Returns the name of the options class of a `model:` section. An unknown kind gets the plain
    decoder's class, so that its other keys are still checked. `spec.checks` refuses the kind
    itself."""
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
