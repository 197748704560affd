"""`raypp explain` and `raypp schema`: describe the job file from its pydantic models."""

import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticUndefined

from raypp.errors import JobError, Problem
from raypp.job.availability import CHOICES
from raypp.job.job import Job
from raypp.job.known_families import FAMILIES, family_options, kinds_with
from raypp.job.models import CustomOptions, DecoderOptions
from raypp.job.section import Section, dotted, section_of, undotted
from raypp.job.wrong_values import all_sections, field_at, literals_of, section_at, shown, translated, words_of
from raypp.kinds import TRACKERS

WIDTH = 88


def explain(section: str | None = None, *, width: int = WIDTH) -> str:
    """Describes the job file, a section (`pipeline.wire`) or a key (`mesh.pp`) as plain text.
    Raises JobError: there is no such section or key. The message suggests the closest one."""
    kinds = [kinds_with(options)[0] for options in reversed(family_options())]  # imports all families
    for of_file in _sections_of_a_file():
        for name, words in _descriptions(of_file).items():
            of_file.model_fields[name].description = words
    if not section:
        head = "A job file is YAML. Every key except `name` has a default. Unknown keys are errors."
        parts = [_section(key, place, width) for key, place in all_sections()]
        return "\n\n".join([head, *parts]) + "\n"
    path = undotted(section.strip())
    place = section_at(path, {})
    if place is not None and path:
        inner = [(key, other) for key, other in all_sections() if key.startswith(f"{dotted(path)}.")]
        parts = [_section(dotted(path), place, width), *(_section(key, other, width) for key, other in inner)]
        return "\n\n".join(parts) + "\n"
    fields = (field_at(path, {"model": {"kind": kind}}) for kind in kinds)
    info = next((field for field in fields if field is not None), None)
    if info is None:
        raise JobError(_no_such_place(section))
    return _field(dotted(path[:-1]), str(path[-1]), info, width) + "\n"


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of the job file, for editors such as yaml-language-server."""
    kinds: dict[type[Section], dict[str, Any]] = {family: {"enum": kinds_with(family)} for family in family_options()}
    kinds[CustomOptions] = {"pattern": "^[^:]+:[^:]+$"}
    sections: list[type[Section]] = [Job, *kinds]
    of_classes, document = models_json_schema([(section, "validation") for section in sections])
    definitions = document["$defs"]
    model = {"oneOf": [of_classes[options, "validation"] for options in kinds], "title": "Model"}
    definitions["Job"]["properties"]["model"] = model
    for options in _sections_of_a_file():
        if options.__name__ in definitions:
            for name, words in _descriptions(options).items():
                definitions[options.__name__]["properties"].setdefault(name, {})["description"] = words
    for options, allowed in kinds.items():
        kind = _property(definitions, options.__name__, "kind")
        kind.update(allowed, description=f"{' | '.join(FAMILIES)} | {kind['description']}")
        if options is not DecoderOptions:
            definitions[options.__name__]["required"] = ["kind"]
    for section, key in (
        ("DataSection", "data.kind"),
        ("PipelineSection", "pipeline.schedule"),
        ("OptimizerOptions", "train.optimizer.kind"),
        ("TrackerOptions", "observe.trackers.kind"),
    ):
        choice = CHOICES[key]
        forms = [{"enum": choice.words()}, {"pattern": choice.own.pattern}]
        _property(definitions, section, key.rpartition(".")[2]).update(anyOf=forms)
    job = definitions.pop("Job")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, **job, "title": "raypp job"}


def _sections_of_a_file(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from _sections_of_a_file(section)


@cache
def _descriptions(section: type[Section]) -> dict[str, str]:
    """Returns the docstrings of a section's fields, by name. Pydantic can do this too
    (`use_attribute_docstrings`), but in every process that imports a job, for half of its time."""
    texts = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        texts[name] = inspect.cleandoc(words)
    return texts


def _property(definitions: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    schema = definitions[section]["properties"][name]
    assert isinstance(schema, dict)
    return schema


def _section(key: str, section: type[Section], width: int) -> str:
    """Describes a section: its purpose and its plain keys, without inner sections."""
    fields = dict(section.model_fields)
    if key == "":
        fields = {name: info for name, info in fields.items() if section_of(info.annotation) is None}
    purpose = "The model to train." if key == "model" else section.__doc__
    text = [f"{key}: {purpose}"] if key else []
    text += [
        _field(key, name, info, width, indent=2) if key else _field("", name, info, width)
        for name, info in fields.items()
    ]
    for options in family_options()[1:] if key == "model" else ():
        kinds = kinds_with(options)
        text.append(f"\n  {' and '.join(kinds)} also {'has' if len(kinds) == 1 else 'have'}:")
        extra = {name: info for name, info in options.model_fields.items() if name not in DecoderOptions.model_fields}
        text += [_field(key, name, info, width, indent=2) for name, info in extra.items()]
    for kind in TRACKERS if key == "observe.trackers" else ():
        text.append(f"\n  options of {kind.name}:")
        for name, words in kind.settings.items():
            text += textwrap.wrap(f"{name}: {words}", width, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(text)


def _field(section: str, name: str, info: FieldInfo, width: int, indent: int = 0) -> str:
    """Describes a key: its default, its type, its help, and which values this version supports."""
    key = f"{section}.{name}" if section else name
    takes = "a word" if key in CHOICES else words_of(info.annotation, tuple(info.metadata))
    default = info.get_default(call_default_factory=True)
    head = name if indent else key
    plain = literals_of(info.annotation) or bool in get_args(info.annotation)
    if section_of(info.annotation) is not None and not plain:
        takes = "section" if default is not None else "section or null"
        head += ":" if default is not None else ": null"
    elif default is PydanticUndefined:
        head += ":"
        takes += "; must be given"
    else:
        head += f": {_yaml(default)}"
    pad = " " * indent
    takes = re.sub(r"\ban? ", "", takes)
    lines = [f"{pad}{head:<{34 - indent}}  {takes}"]
    texts = [" ".join((info.description or "").split())]
    if key in CHOICES:
        known, usable = CHOICES[key].words(), CHOICES[key].available()
        texts = [" | ".join(known), *texts, f"Available now: {', '.join(usable)}." if usable != known else ""]
    for text in texts:
        lines += textwrap.wrap(text, width, initial_indent=pad + "    ", subsequent_indent=pad + "    ")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, dict) else shown(list(value) if isinstance(value, tuple) else value)


def _no_such_place(section: str) -> Problem:
    places = [key for key, _ in all_sections() if key]
    keys = [f"{key}.{name}" if key else name for key, fields in all_sections() for name in fields.model_fields]
    name = section.rpartition(".")[2]
    homes = [key for key in keys if key.rpartition(".")[2] == name]
    close = homes[:1] or difflib.get_close_matches(section, [*places, *keys], n=1)
    fix = f"did you mean {close[0]}?" if close else f"there are: {', '.join(places)}"
    fix = translated(name) or fix
    return Problem("", f"the job file has no {section!r}", fix)
