"""Jobs for the tests of planning."""

from __future__ import annotations

from typing import Any

from raypp.spec.job import Job
from raypp.spec.load import parse_job


def job_with(**sections: Any) -> Job:
    """Returns the job of the throughput benchmarks (8 layers, vocabulary 4096, pp 2) with changes."""
    document: dict[str, Any] = {
        "name": "planned",
        "model": {"num_layers": 8, "hidden_size": 256, "num_heads": 4, "ffn_size": 688, "vocab_size": 4096},
        "data": {"kind": "synthetic", "seq_len": 256},
        "mesh": {"pp": 2},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return parse_job(document)
