"""How a job's documents are opened, by the kind of its data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from raypp.data.corpus import Corpus
from raypp.data.packing import PLAN_VERSION
from raypp.data.random_order import permuted
from raypp.data.source_files import find_files
from raypp.data.synthetic import CountingTokenizer
from raypp.data.tokenised import Request
from raypp.data.tokenizer import Tokenizer, check_fits, open_tokenizer
from raypp.errors import DataError, JobError, Problem, RayppError
from raypp.kinds import SOURCES, SourceKind, data_forms, keeps_data_elsewhere
from raypp.spec.job import DataSection, Job


@dataclass(frozen=True, eq=False)
class Documents:
    """A job's documents, split.

    Attributes:
        train: To train on.
        held_out: None without `data.eval`.
        tokenizer: The job's.
        identity: Of the rows that training sees: documents, tokenizer, and every setting that orders them.
    """

    train: Corpus
    held_out: Corpus | None
    tokenizer: Tokenizer
    identity: str


def job_tokenizer(job: Job) -> Tokenizer:
    """The tokenizer of a job; its ids fit the model.

    Raises:
        DataError: They do not, or there is no such tokenizer.
    """
    if _source(job).ids == "model":
        return CountingTokenizer(job.model.vocab_size)
    tokenizer = open_tokenizer(job.data.tokenizer)
    problems = check_fits(tokenizer, job.model.vocab_size)
    if problems:
        raise DataError(problems)
    return tokenizer


def open_documents(job: Job) -> Documents:
    """Reads and tokenises a job's documents.

    Raises:
        DataError: Something about the data, named with its place.
        UnreachableError: The data are in a store that does not answer, or refuses.
    """
    data, tokenizer = job.data, job_tokenizer(job)
    whole = _read(job, tokenizer, data.path or "", "data.path")
    if data.eval is None or (data.eval.fraction is None and data.eval.path is None):
        return Documents(whole, None, tokenizer, _identity(whole, tokenizer, job, None))
    if data.eval.path is not None:
        if not _source(job).endings:
            what = f"kind {data.kind} reads no files"
            raise DataError(Problem("data.eval.path", what, "use `eval: {fraction: 0.02}`"))
        held_out = _read(job, tokenizer, data.eval.path, "data.eval.path")
        return Documents(whole, held_out, tokenizer, _identity(whole, tokenizer, job, None))
    fraction = data.eval.fraction or 0.0
    train, held_out = split(whole, fraction, job.train.seed)
    return Documents(train, held_out, tokenizer, _identity(whole, tokenizer, job, fraction))


def split(whole: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """The documents to train on and those held out, drawn from the seed, each in their first order.

    Raises:
        DataError: None would be left to train on.
    """
    count = max(1, round(len(whole) * fraction))
    if count >= len(whole):
        what = f"{fraction:g} of {len(whole)} documents leaves none to train on"
        raise DataError(Problem("data.eval.fraction", what, "use a smaller fraction, or more data"))
    drawn = permuted(np.arange(count), len(whole), seed, "held out")
    held_out = np.zeros(len(whole), dtype=bool)
    held_out[drawn] = True
    return whole.select(np.flatnonzero(~held_out)), whole.select(np.flatnonzero(held_out))


def data_identity(job: Job) -> str:
    """A digest of the rows that training sees, in their order; the same for every mesh and on every machine.

    Reads the data like `open_documents`, and raises like it.
    """
    return open_documents(job).identity


def check_data(job: Job) -> list[Problem]:
    """What is wrong with a job's data, as far as this machine can tell without reading it.

    Looks whether the source is known, its files are here and not empty, and the tokenizer's ids fit the model. Data in
    a store are not looked at. Call it where the job's paths mean something: with a cluster elsewhere, on its nodes.
    """
    problems: list[Problem] = []
    try:
        source = _source(job)
    except RayppError as error:
        return list(error.problems)
    try:
        job_tokenizer(job)
    except RayppError as error:
        problems += error.problems
    if not source.endings:
        return problems
    wanted = [("data.path", job.data.path)]
    if job.data.eval is not None and job.data.eval.path is not None:
        wanted.append(("data.eval.path", job.data.eval.path))
    for place, path in wanted:
        try:
            if path is None:
                raise _no_path(job.data)
            if not keeps_data_elsewhere(path):
                find_files(path, source.endings, place)
        except RayppError as error:
            problems += error.problems
    return problems


def _read(job: Job, tokenizer: Tokenizer, path: str, place: str) -> Corpus:
    source = _source(job)
    if source.endings and not path:
        raise _no_path(job.data)
    corpus: Corpus = source.build()(Request(job.data, path, place, tokenizer, job.model.vocab_size, job.train.seed))
    return corpus


def _source(job: Job) -> SourceKind:
    source = SOURCES.get(job.data.kind, key="data.kind")
    if not source.available:
        usable = ", ".join(kind.name for kind in SOURCES.usable())
        what = f"{source.name} is not available yet; available: {usable}"
        raise JobError(Problem("data.kind", what, f"use one of {usable}"))
    return source


def _no_path(data: DataSection) -> DataError:
    fix = f"give {data_forms()}; or `kind: synthetic` to try without data"
    return DataError(Problem("data.path", f"is missing: kind {data.kind} reads files", fix))


def _identity(whole: Corpus, tokenizer: Tokenizer, job: Job, fraction: float | None) -> str:
    data = job.data
    parts = [PLAN_VERSION, whole.digest, tokenizer.identity, data.seq_len, data.packing, data.shuffle, job.train.seed]
    return hashlib.sha256(json.dumps([*parts, fraction]).encode()).hexdigest()[:16]
