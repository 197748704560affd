"""`model.from_hf`: takes a job's sizes from a Hugging Face model's config.json. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from raypp.errors import CheckpointError, JobError, Problem
from raypp.job.job import Job
from raypp.job.models import DecoderOptions
from raypp.job.paths import is_remote
from raypp.job.tokenizer_file import MAKE_ONE, OTHER_FORMATS, TOKENIZER, tokenizer_path
from raypp.kinds import known_source
from raypp.state.checkpoint.arrays import FLOATS, as_float64
from raypp.state.hf.config import options_from_config
from raypp.state.hf.model_files import EMBEDDING, HEAD, HfFiles, matching_tensors, with_base_id
from raypp.state.hf.names import model_tensors
from raypp.state.hf.original import with_original
from raypp.untrusted.text import visible

if TYPE_CHECKING:
    from raypp.job.job_file import JobFile

_COMPARED_BYTES = 16 << 20


def with_hf_sizes(file: JobFile) -> JobFile:
    """Returns the job file with the sizes of `model.from_hf`; unchanged if it is not set. A job
    that names no tokenizer gets the model's own. Reads only config.json, and with `model.lora`
    samples of the weights. Raises JobError: config.json is missing, raypp cannot train its model,
    or the job contradicts it. Or the job needs the model's own tokenizer, and it is in a store.
    Raises StoreError: the store does not answer."""
    model = file.job.model
    if model.from_hf is None:
        return file
    try:
        job = file.job.model_copy(update={"model": hf_options(model)})
        tokenizer, remark = _own_tokenizer(job)
    except JobError as error:
        raise JobError(file.locate(problem) for problem in error.problems) from error
    if tokenizer is not None:
        job = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": tokenizer})})
    return replace(file, job=job, remarks=(*file.remarks, *([remark] if remark else [])))


def _own_tokenizer(job: Job) -> tuple[str | None, str]:
    """Returns the model's tokenizer.json for a job that needs a tokenizer and names none. None
    leaves the job as it is. The second text tells the user which one is used; it may be empty."""
    source, url = known_source(job.data.kind), job.model.from_hf
    if "tokenizer" in job.data.model_fields_set or source is None or source.ids == "model" or url is None:
        return None, ""
    files = HfFiles(url)
    if files.store.head(TOKENIZER) is None:
        if others := [name for name in OTHER_FORMATS if files.store.head(name) is not None]:
            fault = f"is not set, and {visible(url)} has no {TOKENIZER}, but {', '.join(others)}"
            raise JobError(Problem("data.tokenizer", fault, f"{MAKE_ONE}; or name a tokenizer.json, or bytes"))
        return None, f"{visible(url)} has no {TOKENIZER}, and data.tokenizer is not set: bytes is used"
    if is_remote(url):
        fix = "copy the model's tokenizer files to this machine, and name their folder; or write bytes"
        raise JobError(Problem("data.tokenizer", f"is not set, and the model's own is in a store, at {url}", fix))
    path = str(tokenizer_path(url))
    return path, f"data.tokenizer is not set: {visible(path)} is used, the tokenizer of model.from_hf"


def hf_options(model: DecoderOptions) -> DecoderOptions:
    """Returns the `model:` section with the sizes of config.json; see `with_hf_sizes`. Also with
    the files that an export keeps and, with `model.lora`, the identity of the weights."""
    assert model.from_hf is not None
    files = HfFiles(model.from_hf)
    config = files.config()
    options = options_from_config(config, model, files.place("config.json"), lambda: _own_head(files))
    return with_base_id(with_original(options, files, config), files)


def _own_head(files: HfFiles) -> bool:
    """Whether the files hold a head that is not the embedding. Reads both if they hold a head.
    False if their headers cannot be read: whoever reads the weights reports that."""
    try:
        head = files.tensors([HEAD]).get(HEAD)
        embedding = files.tensors([EMBEDDING]).get(EMBEDDING) if head is not None else None
    except CheckpointError:
        return False
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape or not {head.dtype, embedding.dtype} <= {*FLOATS}:
        return True
    for first, last in head.pieces(_COMPARED_BYTES):
        one, other = (as_float64(files.rows(of, first, last), of.dtype) for of in (head, embedding))
        if not np.array_equal(one, other, equal_nan=True):
            return True
    return False


def check_hf_weights(model: DecoderOptions) -> None:
    """Checks from the headers of the model's files that all tensors exist with the right shapes.
    Raises CheckpointError: tensors are missing or have other shapes; StoreError: no answer."""
    if model.from_hf is not None:
        matching_tensors(HfFiles(model.from_hf), model_tensors(model))
