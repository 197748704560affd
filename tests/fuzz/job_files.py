"""Job files, overrides, stored jobs and schedules in files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypp.api.checked_job import load_checked_job
from raypp.errors import RayppError
from raypp.planning.check import check_plan
from raypp.planning.plan import make_plan
from raypp.schedules.catalogue import build_program
from raypp.spec.document import read_document
from raypp.spec.job import Job
from raypp.spec.limits import FILE_BYTES
from raypp.spec.load import job_document, parse_job
from tests.fuzz import target

_JOB = b"""name: a
mesh: &mesh {pp: 2, fsdp: 2}
model: {num_layers: 8, hidden_size: 64, num_heads: 4}
data:
  kind: synthetic
  document_len: [16, 64]
pipeline: {microbatches: 4, layers_per_stage: [3, 5], lookahead: auto}
train: {steps: 5, optimizer: {lr: 3e-4}}
resources: {env: {A: '1'}}
"""
_WORDS = (
    b"&a", b"*a", b"<<: *mesh", b"!!python/object:os.system", b"!!int", b"? ", b"- ", b"---\n", b"|\n", b">\n",
    b"[", b"]", b"{", b"}", b'"\\ud800"', b'"\\0"', b".inf", b".nan", b"1e308", b"0x", b"9" * 50, b"auto", b"null",
    b"%YAML 1.2\n", b"\xef\xbb\xbf",
)  # fmt: skip
_SEPARATOR = "\x1e"
"""Between several `--set`s."""


def _checked(job: Job) -> None:
    check_plan(job)
    if parse_job(job_document(job)) != job:
        raise AssertionError("a job differs from what is stored of it")


def planned(data: bytes, settings: Sequence[str] = ()) -> None:
    """Loads, checks and plans a job file. Every problem has a place, a fix and a bounded length."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_bytes(data)
        try:
            job = load_checked_job(path, settings).job
            _checked(job)
            make_plan(job).as_dict()
        except RayppError as error:
            for problem in error.problems:
                assert (problem.where or problem.key) and problem.fix, str(problem)
                assert len(problem.fault) < 20_000 and len(problem.where) < 300
            raise


@target(_JOB, b"name: a\ndata: {kind: synthetic}\n", words=_WORDS)
def job_file(data: bytes) -> None:
    planned(data)


@target(b"pp: 2\nfsdp: [1, 2]\n", _JOB, words=_WORDS)
def yaml_text(data: bytes) -> None:
    read_document(data.decode("utf-8", "surrogateescape")[:FILE_BYTES], "job.yaml")


@target(
    b"mesh.pp=2", b"model.lora={rank: 4, base: fp32}", b"pipeline.layers_per_stage=[3, 5]", words=(*_WORDS, b".", b"="),
)  # fmt: skip
def override(data: bytes) -> None:
    settings = data.decode("utf-8", "surrogateescape").split(_SEPARATOR)
    planned(b"name: a\ndata: {kind: synthetic}\nmodel: {num_layers: 8}\nmesh: {pp: 2}\n", settings)


@target(json.dumps(job_document(parse_job({"name": "a", "mesh": {"pp": 2}}))).encode())
def stored_job(data: bytes) -> None:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return  # refused by what reads the file
    if isinstance(found, dict):
        _checked(parse_job(found))


@target(b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", words=(b"0F0", b"0I0", b"0W0", b",", b"\n", b"9" * 50))
def schedule_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_bytes(data)
        build_program(str(path), 2, 1, 2)
