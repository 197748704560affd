"""Tests what offloading is predicted to take and to cost, and that too little memory is refused."""

from pathlib import Path
from typing import Any

import pytest
from planned_jobs import job_with

from raypp.errors import ResourcesError
from raypp.planning import offload
from raypp.planning.activations import stage_activation_bytes
from raypp.planning.host_memory import offload_problems, offloaded_by_ranks
from raypp.planning.machines import Machines, Node
from raypp.planning.memory import state_of
from raypp.planning.offload import ON_DEVICE, blocks_of, passing_per_token
from raypp.planning.plan import Grounds, make_plan

GIB = 1 << 30
LARGE = {
    "kind": "llama", "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336, "num_layers": 32,
    "vocab_size": 128256,
}  # fmt: skip


def large(**train: Any) -> Any:
    sections: dict[str, Any] = {"resources": {"device": "cuda"}, "data": {"seq_len": 4096}, "mesh": {"pp": 4}}
    sections["pipeline"] = {"layers_per_stage": [8, 8, 8, 8]}
    return job_with(model=LARGE, train={"precision": "bf16", "micro_batch_size": 1, **train}, **sections)


def test_blocks_hold_consecutive_parameters_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 10)
    assert blocks_of([4, 4, 4, 30, 1, 9, 1]) == [range(2), range(2, 3), range(3, 4), range(4, 6), range(6, 7)]
    assert blocks_of([]) == []


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_moments_and_masters_move_to_host_memory(kind: str) -> None:
    job, plain = large(optimizer={"kind": kind, "offload": True}), large(optimizer={"kind": kind})
    stages, cut = (1,), (8, 8, 8, 8)
    held, before = state_of(job, stages, cut, "cuda"), state_of(plain, stages, cut, "cuda")
    assert held.host == before.weights + before.optimizer == held.saved == before.saved
    assert held.weights == before.weights // 2 and held.optimizer == 0, "bf16 weights only"
    assert held.passing < held.host
    on_cpu = state_of(job, stages, cut, "cpu")
    assert on_cpu.host == 0 and on_cpu.weights + on_cpu.optimizer > before.weights + before.optimizer


def test_fp32_weights_stay_where_they_compute() -> None:
    job = large(precision="fp32", optimizer={"offload": True})
    held = state_of(job, (1,), (8, 8, 8, 8), "cuda")
    assert held.host == 2 * held.weights and held.saved == 3 * held.weights


def test_a_rank_needs_less_memory_and_a_step_more_time() -> None:
    plain, job = make_plan(large()), make_plan(large(optimizer={"offload": True}))
    assert max(rank.total for rank in job.memory) < 0.75 * max(rank.total for rank in plain.memory)
    assert job.host.offloaded == max(offloaded_by_ranks(large(optimizer={"offload": True})))
    assert job.host.state == plain.host.state, "a checkpoint stays as large"
    extra = job.predictions[-1].parts["optimizer"] - plain.predictions[-1].parts["optimizer"]
    largest = max(offloaded_by_ranks(large(optimizer={"offload": True})))
    assert extra == pytest.approx(largest * 8 / 100e9)
    assert any("100 Gbit/s each way" in words for words in job.predictions[-1].assumptions)


def test_inputs_of_layers_move_to_host_memory() -> None:
    full, job = large(activation_checkpointing="full"), large(activation_checkpointing="offload")
    one, cut = 4096 * 4096 * 2, (8, 8, 8, 8)

    def kept(extent: Any, stage: int, kind: Any = "cuda") -> int:
        return 4096 * stage_activation_bytes(extent, stage, cut, kind)

    assert kept(full, 0) - kept(job, 0) == 8 * one
    assert kept(full, 1) - kept(job, 1) == 7 * one, "pipelining keeps what the stage received"
    assert kept(full, 3) - kept(job, 3) == 9 * one
    assert kept(full, 1, "cpu") == kept(job, 1, "cpu"), "host memory is the device's"
    assert passing_per_token(job) * 4096 == ON_DEVICE * one and passing_per_token(full) == 0
    assert offloaded_by_ranks(job)[1] == 3 * 8 * one
    assert offloaded_by_ranks(job)[3] == (8 + 2) * one, "and of the final norm and the projection"
    assert make_plan(job).predictions[-1].step_s >= make_plan(full).predictions[-1].step_s


def test_it_is_refused_where_host_memory_is_too_small(tmp_path: Path) -> None:
    job = large(optimizer={"offload": True})
    needed = offloaded_by_ranks(job)

    def machines(free: int) -> Machines:
        return Machines(tuple(Node(f"n{i}", 1, memory=free) for i in range(4)))

    with pytest.raises(ResourcesError, match=r"train.optimizer.offload: offloading needs .* GiB of host memory"):
        make_plan(job, grounds=Grounds(machines(16 * GIB), device="rtx4090"))
    assert make_plan(job, grounds=Grounds(machines(64 * GIB), device="rtx4090")).host.offloaded == max(needed)
    assert offload_problems(job, {"a": max(needed) - 1, "b": 100 * max(needed)}, "cuda") == []
    (problem,) = offload_problems(job, {"a": sum(needed) - 1}, "cuda")
    assert "1 node has" in problem.fault and "fewer" not in problem.fault
    assert offload_problems(job, {"a": 0, "b": 1}, "cuda") == [], "unknown"
    assert offload_problems(job, {"a": 1}, "cpu") == [], "nothing moves to other memory"
    assert offload_problems(large(), {"a": 1}, "cuda") == []
