"""Small jobs and corpora for the tests of data."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from raypp.errors import RayppError
from raypp.job.job import Job
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.loader import Loader, open_loader
from raypp.rank.data.packing import Row
from raypp.rank.data.sources import open_documents

END = 256


def job(*, vocab_size: int = 320, microbatches: int = 2, micro_batch_size: int = 2, seed: int = 0, **data: Any) -> Job:
    return Job.model_validate(
        {
            "name": "data",
            "model": {"vocab_size": vocab_size},
            "data": data,
            "pipeline": {"microbatches": microbatches},
            "train": {"micro_batch_size": micro_batch_size, "seed": seed},
        }
    )


def data_identity(job: Job) -> str:
    return open_documents(job).identity


@contextmanager
def loading(job: Job, replica: int = 0, replicas: int = 1) -> Iterator[Loader]:
    loader = open_loader(job, replica, replicas)
    try:
        yield loader
    finally:
        loader.close()


def rows_of(steps: Iterable[list[Any]]) -> list[Row]:
    return [row for step in steps for microbatch in step for row in microbatch.rows]


def as_lists(rows: Iterable[Row]) -> list[tuple[list[int], list[int], tuple[int, ...]]]:
    return [(row.tokens.tolist(), row.labels.tolist(), row.documents) for row in rows]


def corpus_of(lengths: Iterable[int]) -> Corpus:
    """Returns documents of the given lengths; no id appears twice."""
    offsets = np.concatenate(([0], np.cumsum(list(lengths)))).astype(np.int64)
    return Corpus((np.arange(offsets[-1], dtype=np.uint32),), offsets, "made")


def texts_of(corpus: Corpus) -> list[str]:
    """Returns the documents of a corpus of bytes, without their end ids."""
    documents = [corpus.ids(i).tolist() for i in range(len(corpus))]
    assert all(document[-1] == END for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def refused(**data: Any) -> str:
    """Opens a job's data, which must have exactly one problem; returns it as `key: what`."""
    with pytest.raises(RayppError) as caught:
        open_documents(job(**data))
    (problem,) = caught.value.problems
    assert problem.fix
    return f"{problem.key}: {problem.fault}"
