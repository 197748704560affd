"""A rank whose device is too small names changes that fit: it asks another process for them."""

import pytest

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.planning.memory import rank_memories
from raypp.rank.device_check import Card, device_problems, memory_taken
from raypp.rank.joining.device_memory import changes_that_fit, planned
from raypp.rank.own_seat import local_seat

GIB = 1 << 30
LARGE = parse_job(
    {
        "name": "large",
        "model": {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "ffn_size": 2752, "vocab_size": 32000},
        "data": {"kind": "synthetic", "seq_len": 2048},
        "mesh": {"pp": 2},
        "train": {"micro_batch_size": 8},
    }
)
SMALL = Card("NVIDIA RTX 3080", (8, 6), 8 * GIB)
SEAT = local_seat(0, 2, 1, LARGE, device="cuda")


def test_a_job_that_does_not_fit_is_refused_with_changes_that_do() -> None:
    needs = [memory.total for memory in rank_memories(LARGE)]
    (problem,) = device_problems(LARGE, SEAT, 2, SMALL, needs=needs)
    assert problem.fault.startswith("rank 0 on localhost, NVIDIA RTX 3080: a device has 8 GiB; ranks are planned")
    assert "pp0 " in problem.fault and problem.fix.startswith("fits by plan: --set ")


def test_who_holds_a_card_is_named_with_what_would_fit() -> None:
    assert memory_taken(LARGE, SEAT, SMALL, 6 * GIB, 6 * GIB) is None
    problem = memory_taken(LARGE, SEAT, SMALL, 6 * GIB, 4 * GIB, lambda: "held by X (pid 7) 4 GiB")
    assert problem is not None and "; fits by plan: --set" in problem.fix
    needs = "6 GiB are needed, 4 GiB of 8 GiB are free; held by X (pid 7) 4 GiB"
    assert problem.fault == f"rank 0 on localhost, NVIDIA RTX 3080: {needs}"


def test_a_rank_that_ran_out_says_its_plan_and_changes_that_fit() -> None:
    stats = {"free": GIB // 2, "reserved": 7 * GIB}
    plan, changes = planned(decide(LARGE, Facts("cuda")), 1, stats)
    assert plan.startswith("planned: ") and "of activations per microbatch, 1 in flight" in plan
    assert changes.startswith("fits by plan: --set ")


def test_without_an_answer_the_command_that_searches_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert changes_that_fit(LARGE, 4 * GIB) == "`raypp plan JOB --fit` searches for changes that fit"
    assert "/no/such/python" in caplog.text
