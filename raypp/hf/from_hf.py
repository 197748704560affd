"""`model.from_hf`: takes a job's sizes from a Hugging Face model's config.json. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from raypp.errors import CheckpointError, JobError, Problem
from raypp.hf.base_identity import with_base_id
from raypp.hf.config import options_from_config
from raypp.hf.model_files import HfFiles
from raypp.hf.names import hf_parts, model_tensors
from raypp.hf.tensor import HfTensor
from raypp.spec.family import Shape
from raypp.spec.job import Job
from raypp.spec.load import JobFile
from raypp.spec.models import DecoderOptions

_SHOWN = 8
_MOST_PARTS = 300_000


def with_hf_sizes(file: JobFile) -> JobFile:
    """Returns the job file with the sizes of `model.from_hf`; unchanged if it is not set.

    Reads only config.json, and with `model.lora` samples of the weights.

    Raises:
        JobError: config.json is missing, raypp cannot train its model, or the job contradicts it.
        StoreError: The store does not answer.
    """
    model = file.job.model
    if model.from_hf is None:
        return file
    try:
        sized = hf_options(model)
    except JobError as error:
        raise JobError(file.locate(problem) for problem in error.problems) from error
    return replace(file, job=file.job.model_copy(update={"model": sized}))


def hf_options(model: DecoderOptions) -> DecoderOptions:
    """Returns the `model:` section with the sizes of config.json; see `with_hf_sizes`.

    With `model.lora`, also with the identity of the weights.
    """
    assert model.from_hf is not None
    files = HfFiles(model.from_hf)
    return with_base_id(options_from_config(files.config(), model, files.place("config.json")), files)


def check_hf_weights(job: Job) -> None:
    """Checks from the headers of the model's files that all tensors exist with the right shapes.

    Raises:
        CheckpointError: Tensors are missing or have other shapes; names them.
        StoreError: The store does not answer.
    """
    if job.model.from_hf is not None:
        matching_tensors(HfFiles(job.model.from_hf), model_tensors(job.model))


def matching_tensors(files: HfFiles, wanted: Mapping[str, Shape]) -> dict[str, HfTensor]:
    """Returns the file tensors that make up the given global tensors, by their name in the files.

    Args:
        files: The model's files.
        wanted: Global names and shapes.

    Raises:
        CheckpointError: Tensors are missing or have other shapes; names them.
    """
    parts = list(islice((part for name, shape in wanted.items() for part in hf_parts(name, shape)), _MOST_PARTS + 1))
    if len(parts) > _MOST_PARTS:
        what = f"has more than {_MOST_PARTS:,} tensors, with one for each expert of a layer"
        raise CheckpointError(Problem(files.store.url, what, "check the sizes of the model"))
    there = files.tensors(part.name for part in parts)
    problems = []
    for part in parts:
        tensor = there.get(part.name)
        if tensor is None:
            problems.append(
                Problem(
                    part.name,
                    f"is not in {files.store.url}",
                    "check that all files, config.json included, are of one model",
                )
            )
        elif tensor.shape != part.shape:
            what = (
                f"has shape {list(tensor.shape)} in {files.place(tensor.key)}, the job's model needs {list(part.shape)}"
            )
            problems.append(Problem(part.name, what, "check that all files, config.json included, are of one model"))
    if problems:
        left = len(problems) - _SHOWN
        raise CheckpointError([*problems[:_SHOWN], *([Problem("", f"and {left} more tensors")] if left > 0 else [])])
    return {part.name: there[part.name] for part in parts}
