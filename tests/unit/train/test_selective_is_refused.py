"""Selective recomputation is refused where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from raypp.kinds import SCHEDULES
from raypp.planning.check import check_plan
from raypp.spec.load import parse_job


def problems(schedule: str, **train: Any) -> list[str]:
    job = {
        "name": "r", "data": {"kind": "synthetic"}, "mesh": {"pp": 2},
        "pipeline": {"schedule": schedule, "stages_per_rank": SCHEDULES.get(schedule).nearest_stages(1)},
        "train": {"activation_checkpointing": "selective", **train},
    }  # fmt: skip
    return [f"{problem.key}: {problem.fault}" for problem in check_plan(parse_job(job))]


@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES if kind.splits_backward])
def test_with_a_backward_in_two_parts(schedule: str) -> None:
    (problem,) = problems(schedule)
    assert problem.startswith("train.activation_checkpointing: selective checkpointing allows one backward per block")


@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES])
def test_never_with_compiled_blocks_whose_backwards_are_whole(schedule: str) -> None:
    assert problems(schedule, compile=True) == []
