"""The resolved pipeline of a job: complete, the same for every caller, and immutable."""

import dataclasses

import pytest
from planned_jobs import job_with

from raypp.errors import JobError
from raypp.planning.decision import Wire
from raypp.planning.flops import end_weights
from raypp.planning.resolve import resolve_pipeline


def test_auto_is_decided() -> None:
    pipeline = resolve_pipeline(job_with(pipeline={"schedule": "auto", "lookahead": "auto", "stages_per_rank": 2}))
    assert (pipeline.schedule, pipeline.lookahead, pipeline.placement) == ("interleaved_1f1b", 0, "loop")
    assert resolve_pipeline(job_with(pipeline={"schedule": "auto"})).schedule == "1f1b"
    assert resolve_pipeline(job_with(pipeline={"schedule": "auto", "microbatches": 1})).schedule == "gpipe"


def test_stages_layers_and_ranks_belong_together() -> None:
    job = job_with(pipeline={"schedule": "zbv", "stages_per_rank": 2, "layers_per_stage": [3, 2, 2, 1]})
    pipeline = resolve_pipeline(job)
    assert pipeline.layers_of_stage == (range(3), range(3, 5), range(5, 7), range(7, 8))
    assert pipeline.stages_of_rank == ((0, 3), (1, 2)) and pipeline.rank_of_stage == (0, 1, 1, 0)
    assert pipeline.sizes == (2, 2, job.pipeline.microbatches) and pipeline.num_stages == 4
    first, last = end_weights(job)
    assert pipeline.stage_weights == [3 + first, 2, 2, 1 + last]


@pytest.mark.parametrize(
    ("wire", "precision", "found"),
    [
        ({}, "fp32", Wire("fp32", "fp32")),
        ({}, "bf16", Wire("bf16", "bf16")),
        ({"dtype": "bf16"}, "fp32", Wire("bf16", "bf16")),
        ({"compression": {"activations": "int8"}}, "bf16", Wire("int8", "bf16")),
        ({"compression": {"activations": "bf16", "gradients": "int8"}}, "fp32", Wire("bf16", "int8")),
    ],
)
def test_the_wire_is_as_computed_unless_the_job_says_otherwise(wire: dict, precision: str, found: Wire) -> None:
    assert resolve_pipeline(job_with(pipeline={"wire": wire}, train={"precision": precision})).wire == found


def test_two_readers_of_a_job_get_the_same_record_and_none_can_change_it() -> None:
    one, other = resolve_pipeline(job_with()), resolve_pipeline(job_with())
    assert one == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.lookahead = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="item assignment"):
        one.program[0] = ()  # type: ignore[index]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"mesh": {"pp": 9}}, "9 stages for 8 layers"),
        ({"pipeline": {"schedule": "nonsense"}}, "nonsense"),
        ({"pipeline": {"schedule": "zbv"}}, "zbv takes 2 per rank"),
    ],
)
def test_what_cannot_be_decided_is_an_error_of_the_job(job: dict, words: str) -> None:
    with pytest.raises(JobError, match=words):
        resolve_pipeline(job_with(**job))
