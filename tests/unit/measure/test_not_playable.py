"""Which steps `raypp plan --exact` refuses to play."""

from typing import Any

import pytest

from raypp.errors import JobError
from raypp.job.load import parse_job
from raypp.tools.played_step import step_peak


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"model": {"kind": "mixtral", "num_experts": 4, "experts_per_token": 2}, "mesh": {"fsdp": 2, "ep": 2}},
            "mesh.ep",
        ),
        ({"train": {"compile": True}}, "train.compile"),
    ],
)
def test_a_step_that_cannot_be_played_is_refused_with_a_way_out(sections: dict[str, Any], said: str) -> None:
    job = parse_job({"name": "refused", "data": {"kind": "synthetic"}, **sections})
    with pytest.raises(JobError) as refused:
        step_peak(job, 0)
    (problem,) = refused.value.problems
    assert problem.key == said and problem.fix
