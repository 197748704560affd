"""Opens a job's documents by the kind of its data; each kind is one file here, such as jsonl.py."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from raypp.errors import DataError, JobError, Problem, RayppError
from raypp.job.job import DataSection, Job
from raypp.job.paths import is_hub_name
from raypp.kinds import SOURCES, SourceKind, data_forms, keeps_data_elsewhere
from raypp.rank.data.corpus import Corpus, joined, without_loss
from raypp.rank.data.faults import Faults
from raypp.rank.data.mixture import Part, part_names, training_corpus
from raypp.rank.data.packing import PLAN_VERSION, permuted
from raypp.rank.data.source_files import counting_left_out, find_files
from raypp.rank.data.tokenised import Record, Request, Text, encoded
from raypp.rank.data.tokenizer import CountingTokenizer, Tokenizer, check_fits, open_tokenizer

if TYPE_CHECKING:  # needs jinja2
    from raypp.rank.data.rows import RowEncoder

_CHECKED = 500  # rows
_WHY = {
    "masked": "carry no loss (prompts, and turns that are not learnt)",
    "too_long": "are in documents that are dropped",
    "held_out": "are held out",
}
_LOSS_READ = 64 << 20
"""Tokens whose loss is read at the start of a run, to say how many carry none."""


@dataclass(frozen=True, eq=False)
class Documents:
    """A job's documents, split into training and held-out part.

    Attributes:
        identity: Digest of the training rows: documents, tokenizer, and every setting that affects
            their order; the same on every mesh and machine.
        parts: The parts of a mixture, whose documents `train` has in order; else empty.
        total: Documents of the source, before any is dropped or held out.
        too_long: Those of them with more than data.seq_len tokens.
        dropped, set_aside: Tokens of documents that are dropped, and that a fraction holds out.
    """

    train: Corpus
    held_out: Corpus | None
    tokenizer: Tokenizer
    identity: str
    parts: tuple[Part, ...] = ()
    total: int = 0
    too_long: int = 0
    dropped: int = 0
    set_aside: int = 0

    @property
    def remarks(self) -> tuple[str, ...]:
        """What of the data is not used, and what else their owner should know."""
        held_out = self.held_out.remarks if self.held_out is not None else ()
        return tuple(dict.fromkeys((*self.train.remarks, *held_out)))

    def untrained(self, most: int = sys.maxsize) -> dict[str, int]:
        """Returns how many tokens are not learnt, by reason; see `without_loss`."""
        masked = without_loss(self.train, most)
        return {"masked": masked, "too_long": self.dropped, "held_out": self.set_aside}

    def untrained_in_words(self, most: int = sys.maxsize) -> str:
        """Returns `untrained` in words; empty if all tokens are learnt."""
        tokens, counts = int(self.train.lengths().sum()), self.untrained(most)
        about = "about " if tokens > most and self.train.loss is not None else ""
        listed = ", ".join(f"{count:,} {_WHY[reason]}" for reason, count in counts.items() if count)
        every = f"{tokens + self.dropped + self.set_aside:,} tokens"
        return listed and f"{about}{sum(counts.values()):,} of {every} are not trained on: {listed}"

    def unused_in_words(self) -> str:
        """Returns what of the data is not used, for the first event of a run; empty for nothing."""
        return "; ".join(filter(None, (self.untrained_in_words(_LOSS_READ), *self.remarks)))

    def in_words(self, data: DataSection) -> str:
        """Returns what the user should know of the documents; empty if there is nothing."""
        remark = self.too_long_in_words(data) if data.too_long == "drop" or self.train.loss is not None else ""
        return "; ".join(filter(None, (remark, *self.tokenizer.remarks)))

    def too_long_in_words(self, data: DataSection) -> str:
        """Returns what happens to documents that are too long; empty if there are none."""
        if not self.too_long:
            return ""
        done = "dropped" if data.too_long == "drop" else "cut into pieces"
        return f"{self.too_long:,} of {self.total:,} documents have more than {data.longest} tokens and are {done}"


def job_tokenizer(job: Job) -> Tokenizer:
    """Returns a job's tokenizer; its ids fit the model. Raises DataError: the ids do not fit, or
    there is no such tokenizer."""
    source, parts = _source(job.data), job.data.parts or []
    kinds = [_kind_of(part.kind, f"data.parts[{i}].kind") for i, part in enumerate(parts)] if source.mixes else [source]
    if all(kind.ids == "model" for kind in kinds):
        return CountingTokenizer(job.model.vocab_size)
    tokenizer = open_tokenizer(job.data.tokenizer, job.data.add_bos, job.data.added_tokens)
    problems = check_fits(tokenizer, job.model.vocab_size)
    if problems:
        raise DataError(problems)
    return tokenizer


def open_documents(job: Job) -> Documents:
    """Reads and tokenises a job's documents. Raises DataError: the data cannot be used; names the
    place; UnreachableError: the store that holds the data does not answer or denies access."""
    tokenizer = job_tokenizer(job)
    if not _source(job.data).mixes:
        train, held_out, counts = _train_and_held_out(job, tokenizer, "data")
        return Documents(train, held_out, tokenizer, _identity(train, tokenizer, job), (), *counts)
    if job.data.eval is not None and job.data.eval.path is not None:
        fault = f"kind {job.data.kind} reads no files by itself"
        raise DataError(Problem("data.eval.path", fault, "use `eval: {fraction: 0.02}`"))
    trained, held, totals = [], [], np.zeros(4, dtype=np.int64)
    options = job.data.parts or []
    for index, (one, name) in enumerate(zip(options, part_names(options), strict=True)):
        alone = job.model_copy(update={"data": job.data.part(index)})
        train, held_out, counts = _train_and_held_out(alone, tokenizer, f"data.parts[{index}]")
        held += [held_out] if held_out is not None else []
        trained.append(Part(name, train, _identity(train, tokenizer, alone), one.weight, one.epochs, one.tokens))
        totals += counts
    if not trained:
        raise DataError(Problem("data.parts", "is empty", "list at least one part"))
    whole = training_corpus(trained)
    identity = _identity(whole, tokenizer, job)
    return Documents(whole, joined(held) if held else None, tokenizer, identity, tuple(trained), *totals.tolist())


def _train_and_held_out(job: Job, tokenizer: Tokenizer, key: str) -> tuple[Corpus, Corpus | None, tuple[int, ...]]:
    """Returns a source's training documents; those held out; how many there are, and are too long;
    the tokens of those that are dropped, and that a fraction holds out."""
    data = job.data
    everything = _read(job, tokenizer, data.path or "", f"{key}.path")
    whole = kept(everything, data, f"{key}.path")
    lengths, tokens = everything.lengths(), int(whole.lengths().sum())
    counts = len(everything), int((lengths > data.longest).sum()), int(lengths.sum()) - tokens, 0
    if data.eval is None or (data.eval.fraction is None and data.eval.path is None):
        return whole, None, counts
    if data.eval.path is not None:
        if not _source(job.data).endings:
            fault = f"kind {data.kind} reads no files"
            raise DataError(Problem("data.eval.path", fault, "use `eval: {fraction: 0.02}`"))
        return whole, kept(_read(job, tokenizer, data.eval.path, "data.eval.path"), data, "data.eval.path"), counts
    train, held_out = split(whole, data.eval.fraction or 0.0, job.train.seed)
    return train, held_out, (*counts[:3], int(held_out.lengths().sum()))


def kept(corpus: Corpus, data: DataSection, place: str) -> Corpus:
    """Returns what `data.too_long: drop` leaves of the documents. Raises DataError: nothing."""
    if data.too_long == "cut":
        return corpus
    short = np.flatnonzero(corpus.lengths() <= data.longest)
    if not len(short):
        fault = f"all {len(corpus):,} documents have more than {data.longest} tokens and would be dropped"
        raise DataError(Problem(place, fault, "raise data.seq_len or data.max_document, or use `too_long: cut`"))
    return corpus if len(short) == len(corpus) else corpus.select(short)


def split(whole: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """Splits documents into training and held-out ones, drawn by the seed; both keep their order.
    Raises DataError: no document would be left to train on."""
    count = max(1, round(len(whole) * fraction))
    if count >= len(whole):
        fault = f"{fraction:g} of {len(whole)} documents leaves none to train on"
        raise DataError(Problem("data.eval.fraction", fault, "use a smaller fraction, or more data"))
    drawn = permuted(np.arange(count), len(whole), seed, "held out")
    held_out = np.zeros(len(whole), dtype=bool)
    held_out[drawn] = True
    return whole.select(np.flatnonzero(~held_out)), whole.select(np.flatnonzero(held_out))


def check_data(job: Job, *, stores: bool = False) -> list[Problem]:
    """Returns the problems of a job's data that this machine can find without reading all of it.

    Checks each source, also the parts of a mixture: that it is known, that its files exist here and
    are not empty, that the tokenizer's ids fit the model, and the first rows if the source can.
    Call it where the job's paths are valid: if the cluster is elsewhere, on its nodes. `stores`:
    also check data in a store. Else they are left out.
    """
    problems: list[Problem] = []
    try:
        _source(job.data)  # the kind is one that is there
    except RayppError as error:
        return list(error.problems)
    try:
        job_tokenizer(job)
    except RayppError as error:
        problems += error.problems
    for key, data in job.data.all_sources():
        if data.path is not None and keeps_data_elsewhere(data.path) and not stores:
            continue
        try:
            _check_files(data, key)
            if not problems:
                _first_rows(job.model_copy(update={"data": data}), f"{key}.path")
        except RayppError as error:
            problems += error.problems
    return problems


def _check_files(data: DataSection, key: str) -> None:
    source, place = _kind_of(data.kind, f"{key}.kind"), f"{key}.path"
    if not source.endings:
        return
    if data.path is None:
        raise _no_path(data.kind, place)
    if not (source.hub and is_hub_name(data.path)):
        files = find_files(data.path, source.endings, place, compressed=source.compressed)
        files[0].read(0, 1)


def _first_rows(job: Job, place: str) -> None:
    """Reads the first rows if some may be unusable: records, or ids that the model lacks."""
    source, path = _source(job.data), job.data.path
    if path is None or source.ids != "text" or (source.hub and is_hub_name(path)):
        return
    request = _request(job, job_tokenizer(job), path, place)
    if source.first_rows or request.tokenizer.vocab_size > request.vocab_size:
        source.build()(replace(request, consumer=_encode_first))


def _encode_first(
    request: Request, files: object, documents: Callable[[], Iterable[Text | Record]], encoder: RowEncoder | None
) -> Corpus:
    faults, rows = Faults(request.place), list(islice(documents(), _CHECKED))
    whole = len(rows) < _CHECKED
    if encoder is None and request.tokenizer.vocab_size <= request.vocab_size:  # any text can be encoded
        rows = [row for row in rows if isinstance(row, Record)]
    for _ in encoded(request, encoder, rows, faults):
        pass
    if faults:
        raise DataError(faults.problems(whole=whole))
    return Corpus((), np.zeros(1, dtype=np.int64), "")


def source_request(job: Job, key: str = "data") -> tuple[Callable[[Request], Corpus], Request]:
    """Returns what reads a job's training documents, and what to ask of it. `job`: with a single
    source. Raises DataError: it has no files of text, or its tokenizer cannot be used."""
    source = _source(job.data)
    if source.mixes or source.ids != "text":
        fault = f"kind {job.data.kind} has no text to tokenise"
        raise DataError(Problem(f"{key}.kind", fault, "train on it as it is"))
    return source.build(), _request(job, job_tokenizer(job), job.data.path or "", f"{key}.path")


def _request(job: Job, tokenizer: Tokenizer, path: str, place: str) -> Request:
    if not path and _source(job.data).endings:
        raise _no_path(job.data.kind, place)
    return Request(job.data, path, place, tokenizer, job.model.vocab_size, job.train.seed)


def _read(job: Job, tokenizer: Tokenizer, path: str, place: str) -> Corpus:
    with counting_left_out() as left:
        corpus: Corpus = _source(job.data).build()(_request(job, tokenizer, path, place))
    return replace(corpus, remarks=(*(f"{path}: {words}" for words in left), *corpus.remarks)) if left else corpus


def _source(data: DataSection) -> SourceKind:
    return _kind_of(data.kind, "data.kind")


def _kind_of(name: str, key: str) -> SourceKind:
    source = SOURCES.get(name, key=key)
    if not source.available:
        usable = ", ".join(kind.name for kind in SOURCES.usable())
        fault = f"{source.name} is not available yet; available: {usable}"
        raise JobError(Problem(key, fault, f"use one of {usable}"))
    return source


def _no_path(kind: str, place: str) -> DataError:
    fix = f"use {data_forms()}; or `kind: synthetic` to try without data"
    return DataError(Problem(place, f"is missing: kind {kind} reads files", fix))


def _identity(train: Corpus, tokenizer: Tokenizer, job: Job) -> str:
    data = job.data
    fraction = data.eval.fraction if data.eval is not None else None
    parts = [PLAN_VERSION, train.digest, tokenizer.identity, data.seq_len, data.packing, data.shuffle, job.train.seed]
    if data.too_long != "cut":
        parts.append(data.too_long)
    if data.max_document is not None:
        parts.append(data.max_document)
    return hashlib.sha256(json.dumps([*parts, fraction]).encode()).hexdigest()[:16]
