"""Predicted tokens/s per GPU beside what others publish (docs/benchmarks/records.md)."""

from pathlib import Path
from typing import Any

import pytest

from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.job.load import parse_job
from raypp.planning.plan import Grounds, Plan, make_plan
from raypp.planning.search import search

JOBS = Path(__file__).parents[3] / "jobs"
PLAIN = {"num_heads": 32, "vocab_size": 32000, "hidden_size": 4096, "num_layers": 32}
MODELS: dict[str, dict[str, Any]] = {
    "8b": {**PLAIN, "num_kv_heads": 8, "ffn_size": 14336, "vocab_size": 128256},
    "7b": {**PLAIN, "ffn_size": 11008},
    "13b": {**PLAIN, "num_layers": 40, "hidden_size": 5120, "num_heads": 40, "ffn_size": 13824},
    "70b": {
        "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_size": 28672,
        "vocab_size": 128256,
    },
    "8x7b": {
        **PLAIN, "kind": "mixtral", "num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2,
        "expert_ffn_size": 14336,
    },
}  # fmt: skip
FREED = {"reshard_after_forward": True}


def job(
    model: str, mesh: dict[str, Any], length: int, rows: int, count: int, extent: str = "full", lora: str = ""
) -> Job:
    adapters = {"lora": {"rank": 16, "alpha": 32, "targets": ["all-linear"], "base": lora}} if lora else {}
    return parse_job(
        {
            "name": "yardstick",
            "model": {**MODELS[model], **adapters},
            "data": {"kind": "synthetic", "seq_len": length},
            "mesh": mesh,
            "pipeline": {"microbatches": count},
            "train": {"micro_batch_size": rows, "precision": "bf16", "activation_checkpointing": extent},
        }
    )


def planned(job: Job, device: str, per_node: int | None = None, link: float | None = None) -> Plan:
    return make_plan(job, Grounds(device=device, per_node=per_node, link_gbps=link))


def template(name: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", []).job


YARDSTICK: dict[str, tuple[Job, tuple[Any, ...], tuple[int, int]]] = {
    "8B, 8 H100, selective": (job("8b", {"fsdp": 8}, 8192, 2, 1, "selective"), ("h100", 8), (5800, 6700)),
    "7B, 8 A100": (job("7b", {"fsdp": 8, **FREED}, 4096, 2, 1, "selective"), ("a100-80", 8), (3700, 3700)),
    "13B, 8 A100": (job("13b", {"fsdp": 8}, 4096, 1, 8), ("a100-80", 8), (1800, 1800)),
    "13B, 8 A100, freed": (job("13b", {"fsdp": 8, **FREED}, 4096, 1, 8), ("a100-80", 8), (1800, 1800)),
    "70B, 32 H100, fsdp": (job("70b", {"fsdp": 32, **FREED}, 8192, 1, 1), ("h100", 8, 400.0), (750, 850)),
    "70B, 32 H100, pp 16": (template("seventy-b"), ("h100", 8, 25.0), (450, 800)),
    "30B-A3B, 16 H100": (template("experts"), ("h100", 8, 100.0), (4000, 9000)),
    "8x7B, 16 H100": (job("8x7b", {"pp": 2, "fsdp": 8, "ep": 8}, 4096, 1, 16), ("h100", 8, 400.0), (4000, 5000)),
    "8B LoRA, 4090": (job("8b", {}, 4096, 1, 16, lora="bf16"), ("rtx4090",), (1800, 2500)),
    "8B QLoRA, 4090": (job("8b", {}, 2048, 2, 4, lora="nf4"), ("rtx4090",), (1500, 2900)),
    "8B, 4 4090, 1 Gbit/s": (template("full-8b"), ("rtx4090", None, 1.0), (1000, 1300)),
    "70B QLoRA, 4 4090": (template("qlora-70b"), ("rtx4090", None, 1.0), (130, 180)),
    "70B QLoRA, H100": (job("70b", {}, 4096, 1, 4, lora="nf4"), ("h100",), (600, 750)),
    "8B, 8 A100-40, pp 8": (job("8b", {"pp": 8}, 4096, 1, 32), ("a100-40", None, 25.0), (1800, 2200)),
    "8B, 16 A100": (job("8b", {"pp": 2, "fsdp": 8}, 8192, 1, 16), ("a100-80", 8, 100.0), (2300, 2700)),
    "8B LoRA, 8 4090": (job("8b", {"fsdp": 8}, 4096, 1, 4, lora="bf16"), ("rtx4090", 8), (1200, 1400)),
}
"""Jobs, grounds of their plans, and the range of tokens/s per GPU."""


def test_forecasts_are_near_what_others_measure_and_what_fits_there_fits() -> None:
    outside = {}
    for name, (one, grounds, (least, most)) in YARDSTICK.items():
        plan = planned(one, *grounds)
        rate = plan.predictions[0].tokens_per_s / plan.world
        outside[name] = max(least / rate, rate / most, 1.0)
        # torchtitan's benchmark takes 82 GiB, of a card with more.
        assert plan.fits or name == "8B, 8 H100, selective", f"{name} needs {plan.predictions[0].peak_memory}"
    assert max(outside.values()) <= 1.35, outside
    assert sum(factor <= 1.2 for factor in outside.values()) >= 0.75 * len(outside), outside


@pytest.mark.parametrize(
    ("one", "device", "spare"),
    [
        (job("13b", {"fsdp": 8}, 4096, 1, 8), "a100-80", 20),
        (job("13b", {"fsdp": 8}, 4096, 1, 1), "a100-80", 20),
        (job("13b", {"fsdp": 8, **FREED}, 4096, 1, 8), "a100-40", 0),
        (job("70b", {"pp": 4, "fsdp": 8, **FREED}, 8192, 1, 32), "h100", 0),
        (job("70b", {"fsdp": 32, **FREED}, 8192, 1, 1), "h100", 20),
    ],
)
def test_sharded_jobs_fit_a_fast_node(one: Job, device: str, spare: int) -> None:
    plan = planned(one, device, 8, 400.0)
    left = plan.predictions[0].device_memory - plan.predictions[0].peak_memory
    assert left >= spare * 2**30


def test_a_toy_job_is_limited_by_its_launches() -> None:
    small = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 256}
    toy = job("8b", {}, 128, 1, 8)
    toy = toy.model_copy(update={"model": toy.model.model_copy(update=small | {"num_kv_heads": 4})})
    assert planned(toy, "h100").predictions[0].tokens_per_s < 1e6


@pytest.mark.slow
def test_two_fast_nodes_shard_inside_them_before_they_cut_the_model() -> None:
    one = job("8b", {"fsdp": 16}, 8192, 2, 1)
    grounds = Grounds(device="h100", per_node=8, link_gbps=3200.0)
    device = grounds.devices_for(one)[0]
    best = search(one, grounds.machines_for(one), device, device_memory=device.memory, kind="cuda").best[0]
    assert best.job.mesh.fsdp >= 8


def test_the_plan_says_what_blocks_take_the_host() -> None:
    def said(device: str, length: int, *, compile: bool) -> tuple[str, float]:
        one = job("8b", {"pp": 2}, length, 1, 8)
        plan = planned(one.model_copy(update={"train": one.train.model_copy(update={"compile": compile})}), device)
        return "".join(one for one in plan.remarks if "the host" in one), plan.predictions[0].step_s

    (short, _), (long, long_s) = (said("h100", length, compile=False) for length in (256, 8192))
    assert "blocks are not compiled (train.compile)" in short and "the GPU waits for it" in short
    assert "blocks are not compiled (train.compile)" in long and "waits" not in long
    (short, _), (compiled, compiled_s) = (said("h100", length, compile=True) for length in (256, 8192))
    assert short.startswith("the host needs") and "the GPU waits for it" in short
    assert not compiled and compiled_s < long_s
    assert not said("cpu", 256, compile=False)[0]
