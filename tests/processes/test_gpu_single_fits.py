"""The runs of `benchmarks.gpu_single` that give the main figures fit into a card of 80 GB."""

from __future__ import annotations

import pytest

from benchmarks.gpu_single import variants
from benchmarks.timed_rank import job_of
from raypp.planning.fit_search import memory_problems

H100 = int(79.1 * 2**30)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [4096, 32768])
@pytest.mark.parametrize("model", ["1b", "8b"])
def test_with_full_recomputation_every_model_fits(model: str, seq_len: int) -> None:
    for variant in variants([model], [seq_len]):
        job = job_of(variant.arguments("bf16")[1::2], world=1, steps=1)
        assert not job.checkpoint.memory_tier, "its first snapshots would fall into the timed steps"
        if "recomputation full" in variant.name and "fp32" not in variant.name:
            assert memory_problems(job, H100) == [], variant.name
