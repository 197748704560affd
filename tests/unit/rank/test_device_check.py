"""Devices that cannot run a job are refused before anything is built on them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypp import retry
from raypp.environment import c_compiler
from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.planning.geometry import Mesh
from raypp.rank import device_check
from raypp.rank.device_check import (
    Card,
    check_device,
    device_problems,
    facts_here,
    free_bytes,
    has_kernels_for,
    host_problems,
    mixed_cards,
    shared_cards,
    wait_for,
)
from raypp.rank.own_seat import local_seat

GIB = 1 << 30
CUDA = Facts("cuda")
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)
T4 = Card("Tesla T4", (7, 5), 15 * GIB)


def job(**sections: Any) -> Job:
    return parse_job({"name": "checked", "mesh": {"pp": 2}, **sections})


def test_a_card_that_can_run_the_job_has_no_problem() -> None:
    bf16 = job(train={"precision": "bf16"})
    assert device_problems(bf16, local_seat(1, 2, 1, bf16, device="cuda"), 2, H100) == []
    fp32 = job(train={"precision": "fp32"})
    assert device_problems(fp32, local_seat(1, 2, 1, fp32, device="cuda"), 2, T4) == []


def test_a_card_too_old_for_bf16_is_named_with_its_capability() -> None:
    bf16 = job(train={"precision": "bf16"})
    (problem,) = device_problems(bf16, local_seat(1, 2, 1, bf16, device="cuda"), 2, T4)
    assert problem.key == "train.precision" and "fp16" in problem.fix
    assert problem.fault == ("rank 1 on localhost: Tesla T4 has compute capability 7.5; bf16 needs 8.0 or newer")


def test_a_card_without_products_in_fp8_is_named_by_what_needs_them() -> None:
    a100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
    base = {"model": {"lora": {"base": "fp8"}}, "train": {"precision": "bf16"}}
    for key, sections in (("train.precision", {"train": {"precision": "fp8"}}), ("model.lora.base", base)):
        fp8 = job(**sections)
        seat = local_seat(1, 2, 1, fp8, device="cuda")
        (problem,) = device_problems(fp8, seat, 2, a100)
        assert problem.key == key and "has compute capability 8.0" in problem.fault and "8.9 or newer" in problem.fault
        assert device_problems(fp8, seat, 2, H100) == []
    experts = job(model={"kind": "qwen3_moe"}, train={"precision": "fp8", "fp8": {"experts": True}})
    (problem,) = device_problems(experts, seat, 2, Card("NVIDIA L40S", (8, 9), 46 * GIB))
    assert problem.key == "train.fp8.experts" and "capability 8.9" in problem.fault and "9.0" in problem.fault
    assert device_problems(experts, seat, 2, H100) == []


def test_a_node_with_too_little_memory_for_what_its_ranks_offload_is_named() -> None:
    large = {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 32000}
    offloading = job(model=large, train={"precision": "bf16", "optimizer": {"offload": True}})
    seat = local_seat(0, 2, 1, offloading, device="cuda")
    (problem,) = host_problems(decide(offloading, CUDA), seat, 8 * GIB)
    assert "localhost has 8 GiB of host memory free; 2 of its ranks offload" in problem.fault
    assert host_problems(decide(offloading, CUDA), seat, 64 * GIB) == []
    assert host_problems(decide(job(model=large), CUDA), seat, 1) == []


def test_a_device_that_torch_does_not_see_is_named() -> None:
    (problem,) = device_problems(job(), local_seat(1, 2, 1, job(), device="cuda"), 1, None)
    assert (
        "rank 1 on localhost needs cuda:1, but torch" in problem.fault and "sees 1 CUDA device there" in problem.fault
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_any_device_the_rank_refuses_before_it_joins() -> None:
    with pytest.raises(JobError, match="sees no CUDA devices there"):
        check_device(decide(job(), CUDA), local_seat(0, 2, 1, job(), device="cuda"))


def test_a_job_that_compiles_needs_a_compiler_on_its_node() -> None:
    compiled = job(train={"compile": True})
    seat = local_seat(0, 2, 1, compiled, device="cuda")
    (problem,) = device_problems(compiled, seat, 2, H100, compiler=None)
    assert problem.key == "train.compile" and "gcc" in problem.fix
    assert "rank 0 on localhost: torch.compile needs a C compiler" in problem.fault
    assert device_problems(compiled, seat, 2, H100) == []
    assert device_problems(job(), seat, 2, H100, compiler=None) == []


def test_the_compiler_that_cc_names_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler() is None
    own = tmp_path / "own-cc"
    own.touch(0o755)
    assert c_compiler() is None
    monkeypatch.setenv("CC", str(own))
    assert c_compiler() == str(own)


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90"], False),
        ((8, 9), ["sm_75", "sm_80", "sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_90a", "sm_100a"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), [], True),
        ((12, 0), ["gfx90a"], True),
    ],
)
def test_a_card_runs_what_was_compiled_for_it(capability: tuple[int, int], built_for: list[str], runs: bool) -> None:
    assert has_kernels_for(capability, built_for) is runs
    seat = local_seat(0, 2, 1, job(), device="cuda")
    problems = device_problems(job(), seat, 2, Card("Card", capability, 80 * GIB), built_for=built_for)
    assert [f"has kernels for {', '.join(built_for)} only" in one.fault for one in problems] == [True] * (not runs)


@pytest.mark.parametrize(("after_s", "waited_s", "found"), [(0, 0, 70), (20, 20, 70), (500, 60, 2)])
def test_memory_of_a_process_that_was_killed_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, after_s: float, waited_s: float, found: int
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    for module in (retry, device_check):
        monkeypatch.setattr(module, "time", clock)
    assert wait_for(30 * GIB, lambda: (70 if now >= after_s else 2) * GIB) == found * GIB
    assert now == waited_s


def test_two_ranks_on_one_card_are_named() -> None:
    labels = ["pp0", "pp1", "pp2"]
    (problem,) = shared_cards(["a 0:41:0", "b 0:41:0", "a 0:41:0"], labels)
    assert problem.fault == "pp0, pp2 have the same card, a at PCI bus 0:41:0" and "MIG" in problem.fix
    assert shared_cards(["", "", ""], labels) == []


def test_cards_of_different_kinds_in_one_stage_are_reported_with_their_ranks() -> None:
    mesh = Mesh.of(job(mesh={"pp": 2, "fsdp": 2}).mesh)
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]

    def reported(*names: str) -> list[str]:
        return mixed_cards(names, places, mesh.labels())

    assert reported("A", "A", "A", "A") == []
    pipeline = "the pipeline has different cards (A on pp0; B on pp1): `raypp plan --links` cuts layers by speed"
    assert reported("A", "A", "B", "B") == [pipeline]
    assert reported("A", "B", "A", "B") == [
        "the ranks of pp0 have different cards: A on pp0-fsdp0; B on pp0-fsdp1",
        "the ranks of pp1 have different cards: A on pp1-fsdp0; B on pp1-fsdp1",
    ]


def test_a_card_without_room_for_a_context_has_nothing_free() -> None:
    def full() -> int:
        raise RuntimeError("CUDA error: out of memory")

    def broken() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    assert (free_bytes(lambda: 7), free_bytes(full)) == (7, 0)
    with pytest.raises(RuntimeError, match="launch failure"):
        free_bytes(broken)


def test_a_device_that_is_not_there_has_no_bf16() -> None:
    assert facts_here(local_seat(0, 2, 1, job())).device == "cpu"
    assert facts_here(local_seat(0, 2, 1, job(), device="cuda:99")) == Facts("cuda", precision="fp32")
