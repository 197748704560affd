"""What a rank on CUDA chooses for its process, and what it records of it."""

from __future__ import annotations

import os

import pytest
import torch

from raypp.errors import JobError
from raypp.inference.evaluate import on_ranks
from raypp.inference.source import Source
from raypp.mesh.geometry import Mesh
from raypp.spec.job import Job
from raypp.spec.load import parse_job
from raypp.train.assemble import assemble
from raypp.train.cuda_settings import cuda_event, prepare_allocator, prepare_queues
from raypp.train.own_seat import local_seat, seat_from_environment

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


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


def test_the_users_number_of_hardware_queues_stays() -> None:
    environment = {QUEUES: "1"}
    prepare_queues(environment)
    assert environment == {QUEUES: "1"}


@pytest.mark.parametrize("path", ["a rank", "torchrun", "eval"])
def test_hardware_queues_are_set_before_cuda_is_asked_for_anything(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads their number when it starts: by the first question for a device."""
    monkeypatch.setenv(QUEUES, "")  # so that it is removed after the test
    monkeypatch.delenv(QUEUES)
    seen: list[str | None] = []

    def there_is_none() -> bool:
        seen.append(os.environ.get(QUEUES))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", there_is_none)
    job = job_with()
    if path == "a rank":
        seat = local_seat(0, 1, 1, job, device="cuda")
        with pytest.raises(JobError, match="sees no CUDA devices"), assemble(job, seat, hang_timeout_s=1):
            pass
    elif path == "torchrun":
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        assert seat_from_environment(job).device == "cpu"
    else:
        source = Source("nowhere", {}, 8, "fp32", None)
        assert on_ranks(lambda rank, port, source, document, device: device, source, job) == "cpu"
    assert seen and set(seen) == {"32"}


def job_with(**train: object) -> Job:
    return parse_job({"name": "cuda", "model": {"kind": "llama"}, "mesh": {"pp": 1}, "train": train})


@pytest.mark.parametrize(
    ("train", "precision", "products"),
    [({}, "fp32", "tf32"), ({"tf32": False}, "fp32", "fp32"), ({"precision": "bf16"}, "bf16", "bf16")],
)
def test_the_run_records_precision_and_allocator(train: dict[str, object], precision: str, products: str) -> None:
    job = job_with(**train)
    seat = local_seat(0, Mesh.of(job.mesh).world, 1, job, device="cuda")
    event = cuda_event(job, seat, "PYTORCH_ALLOC_CONF=expandable_segments:True", "NVIDIA H100", "no C compiler")
    assert event.details["kernels"] == "torch" and event.message.endswith("with the same bits: no C compiler")
    assert (event.kind, event.details["precision"], event.details["products"]) == ("cuda", precision, products)
    assert event.details["allocator"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert "NVIDIA H100" in event.message and f"products in {products}" in event.message
