"""What `raypp data tokenize` writes for a job, and the `data:` section that trains on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypp.data.corpus import Corpus
from raypp.data.mixture import part_names
from raypp.data.sources import source_request
from raypp.data.tokenised import Request
from raypp.errors import DataError, Problem
from raypp.kinds import SOURCES
from raypp.spec.job import Job, SourceOptions


@dataclass(frozen=True)
class Output:
    """A folder of token shards.

    Attributes:
        key: The section of the job file whose documents it holds: `data`, `data.eval` or
            `data.parts[2]`.
        name: Of the folder below `--out`; empty: that folder itself.
        read: The function of the source's kind.
        request: What it reads.
    """

    key: str
    name: str
    read: Callable[[Request], Corpus]
    request: Request


def outputs_of(job: Job) -> list[Output]:
    """Returns the folders of shards for a job's documents.

    A mixture has one for each part with text, named like the part; other parts stay as they are.
    A source with `data.eval.path` has `train` and `eval`.

    Raises:
        DataError: There is no text, or the tokenizer cannot be used.
    """
    data = job.data
    if data.parts and SOURCES.get(data.kind).mixes:
        texts = [index for index, part in enumerate(data.parts) if _has_text(part.kind)]
        if not texts:
            raise DataError(Problem("data.parts", "no part has text to tokenise", "train on the mixture as it is"))
        return [_output(job, f"data.parts[{index}]", names_of(job)[index], data.part(index)) for index in texts]
    if data.eval is None or data.eval.path is None:
        return [_output(job, "data", "", data)]
    held_out = data.model_copy(update={"path": data.eval.path})
    return [_output(job, "data", "train", data), _output(job, "data.eval", "eval", held_out)]


def section_of_shards(job: Job, urls: Mapping[str, str]) -> dict[str, Any]:
    """Returns the `data:` section that trains on shards, with the rows of the job itself.

    Args:
        job: The job.
        urls: The folder of shards for each `Output.key`.
    """
    section = _given(job.data, ["loss"])
    if "data" in urls:
        section = {"kind": "tokens", "path": urls["data"], **_without_source(section)}
    if "data.eval" in urls:
        section["eval"] = {"path": urls["data.eval"]}
    if job.data.parts and "data" not in urls:
        section["parts"] = []
        for index, (part, name) in enumerate(zip(job.data.parts, names_of(job), strict=True)):
            given = {**_given(part), "name": name}
            if (url := urls.get(f"data.parts[{index}]")) is not None:
                given = {"kind": "tokens", "path": url, **_without_source(given)}
            section["parts"].append(given)
    return section


def names_of(job: Job) -> list[str]:
    """Returns the names of the parts of a mixture."""
    return part_names(job.data.parts or [])


def _output(job: Job, key: str, name: str, data: Any) -> Output:
    return Output(key, name, *source_request(job.model_copy(update={"data": data}), key))


def _has_text(kind: str) -> bool:
    source = SOURCES.get(kind)
    return source.ids == "text" and not source.mixes


def _given(options: SourceOptions, but: Sequence[str] = ()) -> dict[str, Any]:
    """Returns what the job file says, without defaults."""
    return options.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(but))


def _without_source(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in SourceOptions.model_fields}
