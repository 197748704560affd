"""Whether a job fits into its devices, and how a refusal says what would make it fit."""

import re
from typing import Any

import pytest
from planned_jobs import job_with, typed

from raypp.job.job import Job
from raypp.planning.check import check_plan
from raypp.planning.decision import CERTAIN
from raypp.planning.fit_search import changes_in_words, memory_problems
from raypp.planning.plan import make_plan


def large(**train: Any) -> Job:
    return job_with(
        model={"hidden_size": 2048, "num_heads": 16, "ffn_size": 5504, "vocab_size": 32000},
        data={"seq_len": 2048},
        train={"micro_batch_size": 4, **train},
    )


def needs(job: Job) -> list[int]:
    return [memory.total for memory in make_plan(job).memory]


def offered(words: str) -> list[str]:
    return re.findall(r"(--set \S+(?: --set \S+)*) \(", words)


def test_a_job_that_fits_has_no_problem() -> None:
    job = large()
    assert memory_problems(job, max(needs(job))) == []
    assert memory_problems(job, int(CERTAIN * max(needs(job))) + 1) == []


def test_a_job_that_cannot_fit_is_refused_per_rank_with_changes_that_fit() -> None:
    job = large()
    small, big = sorted(needs(job))
    capacity = int(0.95 * CERTAIN * big)
    assert small < capacity, "one rank fits"
    (problem,) = memory_problems(job, capacity)
    rank = needs(job).index(big)
    assert f"pp{rank} {big / 2**30:.1f} GiB" in problem.fault and f"pp{1 - rank} " not in problem.fault
    assert problem.fix.startswith("fits by plan: --set ") and offered(problem.fix)
    for words in offered(problem.fix):
        assert check_plan(typed(job, words)) == []
        assert max(needs(typed(job, words))) <= capacity


@pytest.mark.gate
def test_a_measured_excess_makes_changes_need_more() -> None:
    job = large()
    capacity = int(0.6 * max(needs(job)))
    plain, strict = changes_in_words(job, capacity), changes_in_words(job, capacity, factor=1.5)
    assert plain.startswith("fits by plan: ") and strict.startswith("fits by plan: ") and strict != plain
    for words in offered(strict):
        assert 1.5 * max(needs(typed(job, words))) <= capacity + 1


@pytest.mark.gate
def test_a_model_that_nothing_makes_fit_is_reported_as_that() -> None:
    (problem,) = memory_problems(large(), 1 << 20)
    assert "no change that was tried fits" in problem.fix and "the nearest: --set" in problem.fix
