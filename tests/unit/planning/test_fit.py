"""Whether a job fits into its devices, and the changes that make it fit."""

from __future__ import annotations

from typing import Any

import yaml
from planned_jobs import job_with

from raypp.planning.check import check_plan
from raypp.planning.fit import CERTAIN, changes_in_words, changes_that_fit, memory_problems
from raypp.planning.plan import make_plan
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job


def large(**train: Any) -> Job:
    return job_with(
        model={"hidden_size": 2048, "num_heads": 16, "ffn_size": 5504, "vocab_size": 32000},
        data={"seq_len": 2048},
        train={"micro_batch_size": 4, **train},
    )


def needs(job: Job) -> list[int]:
    return [memory.total for memory in make_plan(job).memory]


def with_settings(job: Job, settings: list[str]) -> Job:
    document = job_document(job)
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        document[section][name] = yaml.safe_load(value)
    return parse_job(document)


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
    assert f"pp{rank} {big / 2**30:.1f} GiB" in problem.what and f"pp{1 - rank} " not in problem.what
    assert problem.fix.startswith("fits by plan: --set ")


def test_every_change_can_run_and_really_fits_and_keeps_the_rows_of_a_step() -> None:
    job = large()
    capacity = int(0.6 * max(needs(job)))
    found = changes_that_fit(job, capacity)
    assert found
    rows = job.mesh.replicas * job.pipeline.microbatches * job.train.micro_batch_size
    for fit in found:
        changed = with_settings(job, fit.settings())
        assert check_plan(changed) == []
        assert max(needs(changed)) == fit.peak <= capacity
        assert changed.mesh.world == fit.devices
        assert changed.mesh.replicas * changed.pipeline.microbatches * changed.train.micro_batch_size == rows


def test_a_measured_excess_makes_changes_need_more() -> None:
    job = large()
    capacity = int(0.6 * max(needs(job)))
    plain, strict = changes_in_words(job, capacity), changes_in_words(job, capacity, factor=1.5)
    assert plain.startswith("fits by plan: ") and strict.startswith("fits by plan: ") and strict != plain
    for fit in changes_that_fit(job, int(capacity / 1.5)):
        assert 1.5 * max(needs(with_settings(job, fit.settings()))) <= capacity + 1


def test_a_model_that_nothing_makes_fit_is_told_as_that() -> None:
    (problem,) = memory_problems(large(), 1 << 20)
    assert "no change that was tried fits" in problem.fix
