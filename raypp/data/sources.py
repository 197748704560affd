"""The kinds of data there are, and how a job's documents are opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from raypp.data.corpus import Corpus
from raypp.data.synthetic import CountingTokenizer
from raypp.data.tokenizer import Tokenizer, check_fits, open_tokenizer
from raypp.errors import DataError, Problem
from raypp.registry import Registry
from raypp.spec.job import Job

SOURCES = Registry("data source")
SOURCES.register("text", "raypp.data.text:read", summary="plain text; a document is a paragraph")
SOURCES.register("jsonl", "raypp.data.jsonl:read", summary="JSON lines with the text under data.text_key")
SOURCES.register("tokens", "raypp.data.tokens:read", summary=".npy arrays of ids")
SOURCES.register("synthetic", "raypp.data.synthetic:read", summary="made-up documents that can be learned")


@dataclass(frozen=True, eq=False)
class Documents:
    """A job's documents, split: `held_out` is None without `data.eval`."""

    train: Corpus
    held_out: Corpus | None
    identity: str


def job_tokenizer(job: Job) -> Tokenizer:
    """The tokenizer of a job; its ids fit the model.

    Raises:
        DataError: They do not, or there is no such tokenizer.
    """
    if job.data.kind == "synthetic":
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
    """
    data, tokenizer = job.data, job_tokenizer(job)
    read = SOURCES.get(data.kind, key="data.kind").build()
    if data.kind != "synthetic" and not data.path:
        raise DataError(Problem("data.path", f"kind {data.kind} needs a path", "give a file, a directory or a glob"))
    whole: Corpus = read(data, data.path or "", tokenizer, job.train.seed)
    highest = int(whole.tokens.max())
    if highest >= job.model.vocab_size:
        raise DataError(Problem("data.path", f"holds the id {highest}, model.vocab_size is {job.model.vocab_size}", f"set model.vocab_size to at least {highest + 1}"))
    identity = hashlib.sha256(f"{whole.digest}:{tokenizer.identity}:{data.seq_len}:{data.packing}:{data.eval}".encode()).hexdigest()[:16]
    if data.eval is None:
        return Documents(whole, None, identity)
    if data.eval.path is not None:
        return Documents(whole, read(data, data.eval.path, tokenizer, job.train.seed), identity)
    return _split(whole, data.eval.fraction or 0.0, job.train.seed, identity)


def _split(whole: Corpus, fraction: float, seed: int, identity: str) -> Documents:
    count = max(1, round(len(whole) * fraction))
    if count >= len(whole):
        raise DataError(Problem("data.eval.fraction", f"{fraction:g} of {len(whole)} documents leaves none to train on", "use a smaller fraction, or more data"))
    order = np.random.default_rng([seed, 11]).permutation(len(whole))
    return Documents(whole.select(np.sort(order[count:])), whole.select(np.sort(order[:count])), identity)
