"""What a rank on CUDA chooses for its process, and what it records of it."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raypp.environment import NCCL_OF_TORCH
from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.planning.geometry import Mesh
from raypp.rank import torchrun
from raypp.rank.assemble import assemble
from raypp.rank.joining.cuda_settings import (
    bind_near,
    check_allocator,
    cuda_event,
    listed_cpus,
    prepare_allocator,
    prepare_driver,
    share_compile_threads,
)
from raypp.rank.own_seat import local_seat, seat_from_environment
from raypp.tools.inference import on_seat
from raypp.tools.inference.source import Source
from raypp.torch_private import inductor_config

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


def refused(*, error: str = "", warning: str = "") -> Callable[[], None]:
    def allocate() -> None:
        if warning:
            warnings.warn(warning, stacklevel=1)
        if error:
            raise RuntimeError(error)

    return allocate


@pytest.mark.parametrize(
    "allocate",
    [
        refused(error="CUDA driver error: operation not supported\nDevice-side assertions"),
        refused(warning="expandable_segments not supported on this platform"),
    ],
)
def test_expandable_segments_are_turned_off_where_they_are_refused_and_the_run_says_so(
    allocate: Callable[[], None],
) -> None:
    environment: dict[str, str] = {}
    turned: list[str] = []
    words = check_allocator(prepare_allocator(environment), allocate, turned.append, environment)
    assert words.startswith("PYTORCH_ALLOC_CONF=expandable_segments:False, as expandable segments are refused here (")
    assert "not supported" in words and "\n" not in words
    assert turned == ["expandable_segments:False"] and prepare_allocator(environment) == words.partition(",")[0]


def test_other_errors_and_the_users_setting_of_the_allocator_are_left_alone() -> None:
    untouched: dict[str, str] = {}
    setting = prepare_allocator({})
    assert check_allocator(setting, lambda: None, environment=untouched) == setting
    with pytest.raises(RuntimeError, match="out of memory"):
        check_allocator(setting, refused(error="CUDA out of memory"), environment=untouched)
    own = "PYTORCH_ALLOC_CONF=max_split_size_mb:256"
    assert check_allocator(own, refused(error="not supported"), environment=untouched) == own
    assert not untouched


def test_the_users_number_of_hardware_queues_and_order_of_cards_stay() -> None:
    environment = {QUEUES: "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    prepare_driver(environment)
    assert environment == {QUEUES: "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def test_cards_are_numbered_as_nvidia_smi_numbers_them() -> None:
    environment: dict[str, str] = {}
    prepare_driver(environment)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_ranks_of_a_node_share_its_cores_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    config = inductor_config()
    monkeypatch.setattr(config, "compile_threads", 7)
    share_compile_threads(2, {"TORCHINDUCTOR_COMPILE_THREADS": "7"})
    assert config.compile_threads == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(24))
    for ranks, threads in ((1, 24), (4, 6), (48, 1)):
        share_compile_threads(ranks, {})
        assert config.compile_threads == threads


@pytest.mark.parametrize(
    ("listed", "cpus"), [("0-15,64-79", {*range(16), *range(64, 80)}), ("3", {3}), ("0,2-3", {0, 2, 3})]
)
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(listed: str, cpus: set[int]) -> None:
    assert listed_cpus(listed) == cpus


@pytest.mark.parametrize("listed", [None, "", "\n", "all", "4096-4100\n", "0-4095\n"])
def test_without_a_list_that_narrows_its_cpus_a_rank_keeps_them(listed: str | None, tmp_path: Path) -> None:
    if listed is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0/local_cpulist").write_text(listed)
    before = os.sched_getaffinity(0)
    assert bind_near("0000:1b:00.0", tmp_path) == bind_near("", tmp_path) == ""
    assert os.sched_getaffinity(0) == before


def test_under_torchrun_torchs_threads_do_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_OF_TORCH:
        monkeypatch.setenv(name, "")  # so that it is removed after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    seen: dict[str, str | None] = {}

    def refused(*_: object, **__: object) -> None:
        seen.update((name, os.environ.get(name)) for name in NCCL_OF_TORCH)
        raise ConnectionRefusedError

    monkeypatch.setattr(torchrun, "connect", refused)
    with pytest.raises(ConnectionRefusedError):
        torchrun._run(job_with(), local_seat(0, 1, 1, job_with()))
    assert seen == NCCL_OF_TORCH | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


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
        with pytest.raises(JobError, match="sees no CUDA devices"), assemble(decide(job), seat, hang_timeout_s=1):
            pass
    elif path == "torchrun":
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        assert seat_from_environment(job).device == "cpu"
    else:
        source = Source("nowhere", {}, 8, "fp32", None)
        monkeypatch.setattr(on_seat, "compute", lambda request, seat, tell, turn: {"device": seat.device})
        assert on_seat.answer({"source": vars(source), "job": job_document(job)}, print) == {"device": "cpu"}
    assert seen and set(seen) == {"32"}


def job_with(**train: object) -> Job:
    return parse_job({"name": "cuda", "model": {"kind": "llama"}, "mesh": {"pp": 1}, "train": train})


@pytest.mark.parametrize(
    ("train", "precision", "products"),
    [
        ({"precision": "fp32"}, "fp32", "tf32"),
        ({"precision": "fp32", "tf32": False}, "fp32", "fp32"),
        ({"precision": "bf16"}, "bf16", "bf16"),
    ],
)
def test_the_run_records_precision_and_allocator(train: dict[str, object], precision: str, products: str) -> None:
    job = job_with(**train)
    seat = local_seat(0, Mesh.of(job.mesh).world, 1, job, device="cuda")
    event = cuda_event(job.train, seat, "PYTORCH_ALLOC_CONF=expandable_segments:True", "NVIDIA H100", "no C compiler")
    assert event.details["kernels"] == "torch" and event.message.endswith("memory than planned: no C compiler")
    assert (event.kind, event.details["precision"], event.details["products"]) == ("cuda", precision, products)
    assert event.details["allocator"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert "NVIDIA H100" in event.message and f"products in {products}" in event.message
