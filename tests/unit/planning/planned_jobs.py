"""Jobs for the tests of planning."""

import shlex
from typing import Any

from raypp.job.document import Document
from raypp.job.job import Job
from raypp.job.job_file import apply_overrides
from raypp.job.load import job_document, parse_job


def job_with(**sections: Any) -> Job:
    """Returns the throughput benchmarks' job (8 layers, vocabulary 4096, pp 2) with changes."""
    document: dict[str, Any] = {
        "name": "planned",
        "model": {"num_layers": 8, "hidden_size": 256, "num_heads": 4, "ffn_size": 688, "vocab_size": 4096},
        "data": {"kind": "synthetic", "seq_len": 256},
        "mesh": {"pp": 2},
        "train": {"precision": "fp32"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return parse_job(document)


def typed(job: Job, words: str) -> Job:
    """Returns the job as it is with `--set a=1 --set b=2` typed behind it."""
    given = shlex.split(words)
    assert given[::2] == ["--set"] * (len(given) // 2), words
    document = Document(job_document(job))
    apply_overrides(document, given[1::2])
    assert not document.problems, document.problems
    return parse_job(document.value)
