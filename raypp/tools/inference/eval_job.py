"""The job of an evaluation: which rows a trained model is evaluated on, and how. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.checks import check_spec
from raypp.job.document import Document
from raypp.job.job import Job
from raypp.job.job_file import apply_overrides
from raypp.job.load import parse_job
from raypp.job.paths import is_remote, resolve_paths
from raypp.kinds import SOURCES, SourceKind
from raypp.planning.check import check_plan
from raypp.rank.data.sources import check_data
from raypp.records import ONE_RANK
from raypp.state.hf.original import section_of
from raypp.tools.inference.source import Source

DATA = "--data"
_PIPELINE = ("variable_seq_len", "pad_to_multiple_of", "seq_len_bucket")
_TRAIN = ("micro_batch_size", "seed", "precision", "fp8", "tf32", "compile", "attention")
_OF_ANY_KIND = ("tokenizer", "add_bos", "added_tokens", "seq_len", "packing", "shuffle")
_HF_ROWS = 8
_HF_LONGEST = 4096
"""Longest row of a Hugging Face model. Its context may be far longer than memory allows."""


def data_job(source: Source, data: str | None, pp: int, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that evaluates a model on text.

    It keeps what decides the numbers of the run's own evaluation: rows, microbatches, lengths,
    precision. `data.eval` is set only where the held-out part is a fraction of the training data;
    otherwise all of `data` is evaluated on.

    Args:
        data: The path of the data. None: the run's held-out part, else its data.
        pp: Pipeline ranks.
        overrides: `section.key=value`, as for `raypp plan --set`.

    Raises:
        JobError: There are no data, no tokenizer, or the job is not valid for them.
        DataError: A file is missing, or the tokenizer does not fit the model.
    """
    document = _document(source, pp)
    section = dict(section_of(source.document, "data"))
    if section:
        section["add_bos"] = source.add_bos
    if data is not None:
        section = _other_data(section, data, source, overrides)
    elif not section:
        fault = f"{source.place} does not name any data"
        raise JobError(Problem(DATA, fault, f"give {DATA} PATH, the text to evaluate on"))
    elif isinstance(held_out := section.get("eval"), dict) and held_out.get("path"):
        section |= {"path": held_out["path"], "eval": None}
    document["data"] = section
    job = _checked(document, overrides)
    problems = [*check_spec(job, Path.cwd()), *check_plan(job)] or check_data(job)
    if problems:
        raise JobError(as_asked(problems, data))
    return job


def as_asked(problems: Iterable[Problem], data: str | None) -> list[Problem]:
    """Returns problems of a job from `data_job` in terms of what the user gave."""
    checked = []
    for problem in problems:
        if data is not None and problem.key in ("data.path", "data.eval.path"):
            problem = replace(problem, key=DATA)
        if problem.key == "model.vocab_size":  # that of a trained model cannot be changed
            fix = "use the tokenizer that the model was trained with"
            problem = replace(problem, key="data.tokenizer", fault=f"does not fit the model: {problem.fault}", fix=fix)
        checked.append(problem)
    return checked


def task_job(source: Source, pp: int, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that scores rows of a model's own making: it has no data. Raises JobError:
    the job is not valid."""
    document = _document(source, pp)
    document["data"] = {"kind": "synthetic", "num_documents": 1, "document_len": [2, 2], "seq_len": source.context}
    document["pipeline"]["microbatches"] = max(1, 2 * pp - 1)
    document["train"]["compile"] = False  # texts have another length with every token
    job = _checked(document, overrides)
    if problems := check_plan(job):
        raise JobError(problems)
    return job


def _document(source: Source, pp: int) -> dict[str, Any]:
    """Returns the job without `data`, on `pp` ranks with one stage each."""
    source.job(pp)  # names a mesh that does not fit the model
    train, pipeline, mesh = (section_of(source.document, name) for name in ("train", "pipeline", "mesh"))
    replicas = _number(mesh, "dp_replicate") * _number(mesh, "fsdp")
    count = _number(pipeline, "microbatches", 8) * replicas if source.run else _HF_ROWS
    kept = {key: pipeline[key] for key in _PIPELINE if key in pipeline}
    return {
        "name": source.run or "model",
        "model": dict(source.model),
        "mesh": {**ONE_RANK.as_dict(), "ep": 1, "pp": pp},
        "pipeline": {"microbatches": count, "lookahead": 0} | kept,
        "train": {"optimizer": {"kind": "sgd"}, "precision": "fp32", "compile": False}
        | {key: train[key] for key in _TRAIN if key in train},
        "checkpoint": {"memory_tier": False},
    }


def _checked(document: dict[str, Any], overrides: Sequence[str]) -> Job:
    given = Document(document)
    apply_overrides(given, overrides)
    if given.problems:
        raise JobError(given.problems)
    return resolve_paths(parse_job(given.value), Path.cwd())


def _other_data(section: dict[str, Any], path: str, source: Source, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the data section for another path, with the kind of its ending."""
    if not section:
        section = {"seq_len": min(source.context, _HF_LONGEST)}
        if not any(setting.partition("=")[0].strip() == "data.tokenizer" for setting in overrides):
            section["tokenizer"] = _tokenizer_of_folder(source)
    kind = _kind_of(path, str(section.get("kind", "text")))
    if kind != section.get("kind"):
        section = {key: section[key] for key in _OF_ANY_KIND if key in section}
    return section | {"path": path, "eval": None, "kind": kind}


def _tokenizer_of_folder(source: Source) -> str:
    source.open_tokenizer()  # names what is missing, or does not fit
    assert source.tokenizer is not None
    if is_remote(source.tokenizer):
        fix = "copy it here, and name it: --set data.tokenizer=FILE"
        raise JobError(Problem("data.tokenizer", f"{source.tokenizer} is not on this machine", fix))
    return source.tokenizer


def _kind_of(path: str, usual: str) -> str:
    """Returns the kind of data whose files end like a path; the usual one if that is open."""
    kinds = [kind for kind in SOURCES.usable() if isinstance(kind, SourceKind)]
    known = [kind.name for kind in kinds if kind.endings and path.lower().endswith(tuple(kind.endings))]
    if usual in known or not known:
        return usual if usual in {kind.name for kind in kinds if kind.endings} or ":" in usual else "text"
    return known[0]


def _number(section: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = section.get(name)
    return value if isinstance(value, int) else default
