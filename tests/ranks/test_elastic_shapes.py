"""A run that loses half of its ranks and regains them takes the steps of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_in_turn
from test_recut_of_runs import CHAINS, job_of, live, mesh, tensors
from training import thinned

from raypp.checkpoint.diff import diff_checkpoints
from raypp.control.reshape import best_for, reshaped
from raypp.spec.load import job_document, parse_job

pytestmark = pytest.mark.ranks
Sections = dict[str, Any]
PLAIN = CHAINS["fsdp 2, 1, 4"]


def elastic_job(root: Path, steps: int, room: int) -> Sections:
    """Returns the job of 4 ranks up to a step, as it runs with room for `room` ranks."""
    sections = job_of(PLAIN, root, steps, mesh(pp=2, dp_replicate=2)) | {"recovery": {"elastic": True}}
    job = parse_job(sections)
    shape = best_for(job, room)
    assert shape is not None
    return job_document(reshaped(job, shape))


@pytest.mark.parametrize(("room", "world"), thinned([(3, 2), (1, 1)], [], [(3, 2)]))
def test_shrinking_and_growing_changes_neither_losses_nor_weights(tmp_path: Path, room: int, world: int) -> None:
    changed, undisturbed = tmp_path / "changed", tmp_path / "undisturbed"
    first, reference = run_in_turn(4, live, [(elastic_job(changed, 1, 4), 1), (elastic_job(undisturbed, 3, 4), 1)])
    (second,) = run_in_turn(world, live, [(elastic_job(changed, 2, room), 2)])
    (third,) = run_in_turn(4, live, [(elastic_job(changed, 3, 4), 3)])
    assert "resumed" in second[0]["kinds"] and "resumed" in third[0]["kinds"]
    told = {step: numbers for part in (first, second, third) for step, *numbers in part[0]["numbers"]}
    assert list(told) == [1, 2, 3]
    for step, loss, norm, tokens in reference[0]["numbers"]:
        assert told[step] == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), tokens]
    comparison = diff_checkpoints(tensors(changed), tensors(undisturbed))
    assert not (comparison.only_a or comparison.only_b or comparison.other_form)
    assert max((one.max_abs for one in comparison.different), default=0.0) < 1e-5
