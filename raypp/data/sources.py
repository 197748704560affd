"""Opens a job's documents, by the kind of its data."""

from __future__ import annotations

import hashlib
import json
import sys
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
    """A job's documents, split into training and held-out part.

    Attributes:
        train: The training documents.
        held_out: The held-out documents; None without `data.eval`.
        tokenizer: The job's tokenizer.
        identity: Digest of the training rows: documents, tokenizer, and every setting that affects
            their order.
        total: Documents of data.path, before any is dropped or held out.
        too_long: Those of them with more than data.seq_len tokens.
    """

    train: Corpus
    held_out: Corpus | None
    tokenizer: Tokenizer
    identity: str
    total: int = 0
    too_long: int = 0

    def too_long_in_words(self, data: DataSection) -> str:
        """Returns what happens to documents that are too long; empty if there are none."""
        if not self.too_long:
            return ""
        done = "dropped" if data.too_long == "drop" else "cut into pieces"
        return f"{self.too_long:,} of {self.total:,} documents have more than {data.seq_len} tokens and are {done}"


def job_tokenizer(job: Job) -> Tokenizer:
    """Returns a job's tokenizer; its ids fit the model.

    Raises:
        DataError: The ids do not fit, or there is no such tokenizer.
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
        DataError: The data cannot be used; names the place.
        UnreachableError: The store that holds the data does not answer or denies access.
    """
    data, tokenizer = job.data, job_tokenizer(job)
    everything = _read(job, tokenizer, data.path or "", "data.path")
    whole = kept(everything, data, "data.path")
    counts = len(everything), int((everything.lengths() > data.seq_len).sum())
    if data.eval is None or (data.eval.fraction is None and data.eval.path is None):
        return Documents(whole, None, tokenizer, _identity(whole, tokenizer, job, None), *counts)
    if data.eval.path is not None:
        if not _source(job).endings:
            what = f"kind {data.kind} reads no files"
            raise DataError(Problem("data.eval.path", what, "use `eval: {fraction: 0.02}`"))
        held_out = kept(_read(job, tokenizer, data.eval.path, "data.eval.path"), data, "data.eval.path")
        return Documents(whole, held_out, tokenizer, _identity(whole, tokenizer, job, None), *counts)
    fraction = data.eval.fraction or 0.0
    train, held_out = split(whole, fraction, job.train.seed)
    return Documents(train, held_out, tokenizer, _identity(whole, tokenizer, job, fraction), *counts)


def kept(corpus: Corpus, data: DataSection, place: str) -> Corpus:
    """Returns the documents without those that `data.too_long: drop` leaves out.

    Raises:
        DataError: None is left.
    """
    if data.too_long == "cut":
        return corpus
    short = np.flatnonzero(corpus.lengths() <= data.seq_len)
    if not len(short):
        what = f"all {len(corpus):,} documents have more than {data.seq_len} tokens and would be dropped"
        raise DataError(Problem(place, what, "raise data.seq_len, or use `too_long: cut`"))
    return corpus if len(short) == len(corpus) else corpus.select(short)


def split(whole: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """Splits documents into training and held-out ones, drawn by the seed; both keep their order.

    Raises:
        DataError: No document would be left to train on.
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
    """Returns a digest of the training rows in their order, the same on every mesh and machine.

    Reads the data and raises errors as `open_documents` does.
    """
    return open_documents(job).identity


def check_data(job: Job) -> list[Problem]:
    """Returns the problems of a job's data that this machine can find without reading all of it.

    Checks that the source is known, that its files exist here and are not empty, that the
    tokenizer's ids fit the model, and the first rows if the source can. Data in a store are not
    checked. Call it where the job's paths
    are valid: if the cluster is elsewhere, on its nodes.
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
                find_files(path, source.endings, place, compressed=source.compressed)
                problems += _first_rows(job, source, path, place, problems)
        except RayppError as error:
            problems += error.problems
    return problems


def _first_rows(job: Job, source: SourceKind, path: str, place: str, found: list[Problem]) -> list[Problem]:
    """Checks the first rows of local files."""
    if not source.checks_rows or found:
        return []
    check = sys.modules[source.build().__module__].check
    problems: list[Problem] = check(Request(job.data, path, place, job_tokenizer(job), job.model.vocab_size, 0))
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
    fix = f"use {data_forms()}; or `kind: synthetic` to try without data"
    return DataError(Problem("data.path", f"is missing: kind {data.kind} reads files", fix))


def _identity(whole: Corpus, tokenizer: Tokenizer, job: Job, fraction: float | None) -> str:
    data = job.data
    parts = [PLAN_VERSION, whole.digest, tokenizer.identity, data.seq_len, data.packing, data.shuffle, job.train.seed]
    if data.too_long != "cut":
        parts.append(data.too_long)
    return hashlib.sha256(json.dumps([*parts, fraction]).encode()).hexdigest()[:16]
