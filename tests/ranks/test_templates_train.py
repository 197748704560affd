"""The small twin of every example job trains: its loss falls, on the mesh that its header gives."""

import math
import sys
from typing import Any

import pytest
from gallery import NAMES, small
from training import on_ranks, thinned, train_steps

from raypp.api.checked_job import load_checked_job
from raypp.cli.job_commands import TEMPLATES
from raypp.job.load import job_document

STEPS = 8
QUICK = ["own-model", "finetune-hf"]
GATE = ["qlora-30b"]


def train_twin(rank: int, world: int, port: int, *arguments: Any) -> dict[str, Any]:
    """Trains with the modules of the example jobs in reach, as `PYTHONPATH=.` puts them."""
    if str(TEMPLATES) not in sys.path:
        sys.path.append(str(TEMPLATES))
    return train_steps(rank, world, port, *arguments)


@pytest.fixture(scope="module")
def twins() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TEMPLATES))
        return {name: job_document(load_checked_job(TEMPLATES / f"{name}.yaml", small(name)).job) for name in NAMES}


@pytest.mark.parametrize("name", thinned(NAMES, QUICK, GATE))
def test_the_small_twin_of_a_job_trains(name: str, twins: dict[str, dict[str, Any]]) -> None:
    ranks = on_ranks(twins[name], STEPS, train=train_twin)
    losses = ranks[0]["loss"]
    assert len(losses) == STEPS and all(map(math.isfinite, losses))
    assert all(other["loss"] == losses for other in ranks)
    assert sum(losses[-2:]) < 0.99 * sum(losses[:2]), losses
    held = {key for rank in ranks for key in rank["weights"]}
    moved = {key for rank in ranks for step in rank["gradients"] for key, g in step.items() if g.abs().max() > 0}
    trained = {key for key in held if "lora_" in key} or held
    assert moved == trained, f"only one has them: {sorted(trained ^ moved)}"
