"""The registry of model families: maps `model.kind` to what the family declares. A family is the
`FAMILY` of the module of its name in `raypp.job.families`, which is imported when a job names it.
Its builder and layers are imported on first use: reading a job needs no torch."""

import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import PlainValidator, SerializeAsAny, ValidationInfo

from raypp.job import families
from raypp.job.family import Family, whole_heads
from raypp.job.models import CustomOptions, DecoderOptions
from raypp.job.rope import Rotary
from raypp.registry import Kind, Registry


class _Families(Mapping[str, Family]):
    """Imports the module of a family when it is looked up, those of all to iterate."""

    def __getitem__(self, kind: str) -> Family:
        module = kind in self._modules and importlib.import_module(f"{families.__name__}.{kind}")
        family: Family | None = getattr(module, "FAMILY", None)
        if family is None:
            raise KeyError(kind)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(module.name for module in pkgutil.iter_modules(families.__path__))

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted((name for name in self._modules if name in self), key=lambda name: (self[name].position, name))


FAMILIES: Mapping[str, Family] = _Families()
"""The families by `model.kind`, in the order in which lists show them."""

MODELS = Registry("model", Kind, kinds=FAMILIES)


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
    return list(dict.fromkeys([DecoderOptions, *(family.options for family in FAMILIES.values())]))


def kinds_with(options: type[DecoderOptions]) -> list[str]:
    """Returns the kinds whose `model:` section has this class."""
    return [family.name for family in FAMILIES.values() if family.options is options]


def model_options(value: Any) -> type[DecoderOptions]:
    """Returns the options class of a `model:` section, a mapping or options. An unknown kind, which
    `job.checks` refuses, gets the plain decoder's class, so that its other keys are checked."""
    kind = value.get("kind", "llama") if isinstance(value, dict) else getattr(value, "kind", "llama")
    if not isinstance(kind, str):
        return DecoderOptions
    if kind in FAMILIES:
        return FAMILIES[kind].options
    return CustomOptions if ":" in kind else DecoderOptions


def _validated(value: Any, info: ValidationInfo) -> DecoderOptions:
    options = model_options(value)
    if info.mode == "json":  # a job in JSON is read in strict mode, see `raypp.job.load`
        return options.model_validate_json(json.dumps(value), strict=True)
    return options.model_validate(value)


ModelSection = Annotated[
    SerializeAsAny[DecoderOptions], PlainValidator(_validated, json_schema_input_type=DecoderOptions)
]
"""Type of the job's `model:` section: an instance of the options class of its kind, which is found
when a job is read. Its JSON Schema is that of every decoder; `raypp.job.explain.schema` has all."""
