"""Resolves relative paths of the job file and checks whether local paths exist."""

import glob
import os
import re
from pathlib import Path

from raypp.job.job import Job
from raypp.job.tokenizer_file import tokenizer_path
from raypp.untrusted.files import expand_home, matches
from raypp.user_folder import raypp_home

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_remote(path: str) -> bool:
    """Whether the path is a URL (`s3://bucket/key`), which names a place in a store."""
    return "://" in path


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist here may be a name on Hugging Face's hub (`org/name`)."""
    return _HUB_NAME.fullmatch(path) is not None and not os.path.lexists(path)


def is_glob(path: str) -> bool:
    return glob.has_magic(path)


def resolve_paths(job: Job, directory: Path) -> Job:
    """Returns the job with absolute paths. Relative paths of inputs are looked up in the current
    directory, then next to the job file (`directory`). A path that exists in neither place stays
    unchanged; `spec.checks` reports it. `checkpoint.url` is relative to the current directory. `~`
    is the user's home directory."""
    data, model = job.data, job.model
    paths: dict[str, object] = {"path": data.path and resolve_path(data.path, directory)}
    if data.parts is not None:
        paths["parts"] = [
            part.model_copy(update={"path": part.path and resolve_path(part.path, directory)}) for part in data.parts
        ]
    if data.tokenizer != "bytes":
        tokenizer = resolve_path(data.tokenizer, directory)
        paths["tokenizer"] = tokenizer if is_remote(tokenizer) else str(tokenizer_path(tokenizer))
    if data.chat_template:
        paths["chat_template"] = resolve_path(data.chat_template, directory)
    if data.eval is not None and data.eval.path:
        paths["eval"] = data.eval.model_copy(update={"path": resolve_path(data.eval.path, directory)})
    if model.from_hf:
        model = model.model_copy(update={"from_hf": resolve_path(model.from_hf, directory)})
    pipeline = job.pipeline
    if pipeline.schedule.endswith(".csv"):
        pipeline = pipeline.model_copy(update={"schedule": resolve_path(pipeline.schedule, directory)})
    url = job.checkpoint.url
    if "url" not in job.checkpoint.model_fields_set:
        url = str(raypp_home() / "checkpoints")
    if not is_remote(url):
        url = str(expand_home(url).absolute())
    return job.model_copy(
        update={
            "data": data.model_copy(update=paths),
            "model": model,
            "pipeline": pipeline,
            "checkpoint": job.checkpoint.model_copy(update={"url": url}),
        }
    )


def resolve_path(path: str, directory: Path) -> str:
    """Returns the absolute path of an existing file, directory or glob, else the expanded path."""
    if is_remote(path):
        return path
    expanded = expand_home(path)
    if expanded.is_absolute():
        return str(expanded)
    for start in (Path.cwd(), directory):
        candidate = start / expanded
        if exists(str(candidate)):
            return str(candidate)
    return str(expanded)


def exists(path: str) -> bool:
    """Whether the local path exists, or the glob matches something."""
    return os.path.lexists(path) or (is_glob(path) and next(matches(path), None) is not None)
