"""What a rank on CUDA chooses for its process, and what it records of it."""

from __future__ import annotations

import pytest

from raypp.mesh.geometry import Mesh
from raypp.spec.job import Job
from raypp.spec.load import parse_job
from raypp.train.cuda_settings import cuda_event, prepare_allocator
from raypp.train.own_seat import local_seat


def test_the_allocator_gets_expandable_segments_unless_the_user_configures_it() -> None:
    environment: dict[str, str] = {}
    assert prepare_allocator(environment) == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert prepare_allocator(environment) == "PYTORCH_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["max_split_size_mb:256", ""])
def test_the_users_setting_of_the_allocator_stays(name: str, value: str) -> None:
    environment = {name: value}
    assert prepare_allocator(environment) == f"{name}={value}"
    assert environment == {name: value}


def job_with(**train: object) -> Job:
    return parse_job({"name": "cuda", "model": {"kind": "llama"}, "mesh": {"pp": 1}, "train": train})


@pytest.mark.parametrize(
    ("train", "precision", "products"),
    [({}, "fp32", "tf32"), ({"tf32": False}, "fp32", "fp32"), ({"precision": "bf16"}, "bf16", "bf16")],
)
def test_the_run_records_precision_and_allocator(train: dict[str, object], precision: str, products: str) -> None:
    job = job_with(**train)
    seat = local_seat(0, Mesh.of(job.mesh).world, 1, job, device="cuda")
    event = cuda_event(job, seat, "PYTORCH_ALLOC_CONF=expandable_segments:True", "NVIDIA H100")
    assert (event.kind, event.details["precision"], event.details["products"]) == ("cuda", precision, products)
    assert event.details["allocator"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert "NVIDIA H100" in event.message and f"products in {products}" in event.message
