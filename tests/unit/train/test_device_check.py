"""Devices that cannot run a job are refused before anything is built on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypp.errors import JobError
from raypp.mesh.geometry import Mesh
from raypp.spec.job import Job
from raypp.spec.load import parse_job
from raypp.train.device_check import Card, check_device, device_problems, host_problems, mixed_cards
from raypp.train.own_seat import local_seat

GIB = 1 << 30
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
    assert problem.key == "train.precision" and "fp32" in problem.fix
    assert problem.what == ("rank 1 on localhost: Tesla T4 has compute capability 7.5; bf16 needs 8.0 (A100) or newer")


def test_a_node_with_too_little_memory_for_what_its_ranks_offload_is_named() -> None:
    large = {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 32000}
    offloading = job(model=large, train={"precision": "bf16", "optimizer": {"offload": True}})
    seat = local_seat(0, 2, 1, offloading, device="cuda")
    (problem,) = host_problems(offloading, seat, 8 * GIB)
    assert "localhost has 8 GiB of host memory free; 2 of its ranks offload" in problem.what
    assert host_problems(offloading, seat, 64 * GIB) == []
    assert host_problems(job(model=large), seat, 1) == []


def test_a_device_that_torch_does_not_see_is_named() -> None:
    (problem,) = device_problems(job(), local_seat(1, 2, 1, job(), device="cuda"), 1, None)
    assert "rank 1 on localhost needs cuda:1, but torch" in problem.what and "sees 1 CUDA device there" in problem.what


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_any_device_the_rank_refuses_before_it_joins() -> None:
    assert check_device(job(), local_seat(0, 2, 1, job())) is None
    with pytest.raises(JobError, match="sees no CUDA devices there"):
        check_device(job(), local_seat(0, 2, 1, job(), device="cuda"))


def test_a_job_that_does_not_fit_is_refused_with_changes_that_do() -> None:
    large = job(
        model={"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 32000},
        data={"kind": "synthetic", "seq_len": 4096},
    )
    (problem,) = device_problems(large, local_seat(0, 2, 1, large, device="cuda"), 2, T4)
    assert problem.what.startswith("rank 0 on localhost, Tesla T4: a device has 15 GiB; ranks are planned")
    assert "pp0 " in problem.what and "pp1 " in problem.what and problem.fix


def test_cards_of_different_kinds_in_one_stage_are_told_with_their_ranks() -> None:
    mesh = Mesh.of(job(mesh={"pp": 2, "fsdp": 2}).mesh)
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]

    def told(*names: str) -> list[str]:
        return mixed_cards(names, places, mesh.labels())

    assert told("A", "A", "B", "B") == [], "stages may differ: the cut balances them"
    assert told("A", "A", "A", "B") == ["the ranks of pp1 have different cards: A on pp1-fsdp0; B on pp1-fsdp1"]
