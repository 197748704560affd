"""Resolves relative paths of the job file and checks whether local paths exist. And the small files
that a job names, which travel with it: tokenizer, chat template, schedule. The package of a run has
them below `FOLDER`, its store below `NAME/files`. The job keeps its paths."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.job.job import Job
from raypp.job.tokenizer_file import tokenizer_path
from raypp.untrusted.files import expand_home, matches, read_file
from raypp.user_folder import raypp_home

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

FOLDER = "raypp-files"
MOST_BYTES = 64 << 20
"""Most bytes of all small files of a job. What would exceed it does not travel."""
KEYS = (("data", "tokenizer"), ("data", "chat_template"), ("pipeline", "schedule"))
SAVED_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip
"""The files that transformers saves beside a tokenizer.json."""
TEMPLATES = "additional_chat_templates"
_OF_MODEL = ("generation_config.json", "config.json")


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


def small_files(*documents: Mapping[str, Any]) -> dict[tuple[str, Path], dict[str, bytes]]:
    """Reads the small files that resolved jobs name on this machine. Returns per key and path the
    contents, by `stored_name`, of the file and of those beside a tokenizer that belong to it; none
    if they are too large to travel."""
    found, left = dict[tuple[str, Path], dict[str, bytes]](), MOST_BYTES
    for document, (section, key) in ((document, at) for document in documents for at in KEYS):
        value = str((document.get(section) or {}).get(key))
        path, is_path = Path(value), value.endswith(".csv") if key == "schedule" else value != "bytes"
        there = is_path and os.path.isfile(path)  # noqa: PTH113 - false for no name
        if there and (f"{section}.{key}", path) not in found:
            paths = [path, *(_beside(path.parent) if key == "tokenizer" else ())]
            size = sum(one.stat().st_size for one in paths)
            read = paths if size <= left else []
            found[f"{section}.{key}", path] = {stored_name(path, one): read_file(one, MOST_BYTES) for one in read}
            left -= size if read else 0
    return found


def contents(*documents: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the small files of resolved jobs that travel, by `stored_name`."""
    return {name: content for files in small_files(*documents).values() for name, content in files.items()}


def stored_name(path: Path, beside: Path | None = None) -> str:
    """Returns the name under which a file travels, or one beside it or below its folder."""
    folder = hashlib.sha256(str(path.parent).encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{folder}/{(beside or path).relative_to(path.parent).as_posix()}"


def here(path: Path) -> Path:
    """Returns where a run's process has a file that its job names: in its package, else there."""
    packed = Path(__file__).resolve().parents[2] / FOLDER / stored_name(path)
    return packed if os.path.isfile(packed) else path  # noqa: PTH113 - false for no name


def _beside(folder: Path) -> list[Path]:
    names = [folder / name for name in (*SAVED_BESIDE, *_OF_MODEL)]
    return [path for path in (*names, *sorted((folder / TEMPLATES).glob("*.jinja"))) if path.is_file()]
