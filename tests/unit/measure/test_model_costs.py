"""What `raypp plan --measure` hands to the forecast, for a small model; no figure is a promise."""

from typing import Any

import pytest

from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.tools import model_costs


def job_with(**train: Any) -> Job:
    sizes = {"num_layers": 6, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "vocab_size": 31}
    document = {
        "name": "measured", "model": sizes, "data": {"kind": "synthetic", "seq_len": 8},
        "mesh": {"pp": 2, "fsdp": 2}, "pipeline": {"microbatches": 8}, "train": train,
    }  # fmt: skip
    return parse_job(document)


@pytest.mark.parametrize(
    "train", [{}, {"activation_checkpointing": "selective"}, {"precision": "bf16"}], ids=["plain", "selective", "bf16"]
)
def test_every_part_of_a_model_gets_its_cost(train: dict[str, Any]) -> None:
    with model_costs.open_meter(job_with(**train)) as meter:
        found = meter.take(rounds=1)
    for part in ("layer", "first", "last"):
        assert set(found[part]) == {"forward", "backward"} and min(found[part].values()) >= 0
    assert min(found["layer"].values()) > 0 and found["optimizer_s"] > 0 and found["step_s"] > 0
    assert found["input_share"] != 1 and found["weight_share"] > 0
    assert found["kind"] == "cpu"
