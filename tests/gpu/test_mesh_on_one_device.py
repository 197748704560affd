"""Every schedule, lookahead and mesh axis on one device gives the numbers of one rank on the CPU.

The ranks share the device (`ranks.py`): NCCL on a GPU, gloo without one. Several jobs of a world
run in the same processes. Each job computes one step in fp32, so that no update amplifies a
rounding.
"""

from functools import cache
from typing import Any

import pytest
import torch
from comparison import assert_close
from ranks import DEVICE, run_in_turn_on_one_device, train
from training import merged, thinned, train_steps

from raypp.job.load import parse_job
from raypp.planning.geometry import Mesh
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named
from raypp.stages.pipeline.runtime import ProgramRuntime

MICROBATCHES = 8
FP32 = 1e-4
"""Bound on the relative error of a loss and, by the 2-norm, of a gradient. A GPU's kernels add in
another order; on the CPU the same comparison is at 1e-6."""
ACROSS_PRECISIONS = 5e-2
"""The same for bf16, which keeps 8 bits; int8 messages keep 7."""

LLAMA = {
    "kind": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96,
    "vocab_size": 128,
}  # fmt: skip
EXPERTS = {
    **LLAMA, "kind": "qwen3_moe", "num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 48,
    "aux_loss_weight": 0.02, "z_loss_weight": 0.01,
}  # fmt: skip


def document(
    model: dict[str, Any] = LLAMA,
    *,
    mesh: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> dict[str, Any]:
    mesh = mesh or {}
    base = {"steps": 1, "micro_batch_size": 2, "seed": 3, "precision": "fp32", "compile": False, "clip_norm": 0.05}
    replicas = mesh.get("fsdp", 1) * mesh.get("dp_replicate", 1)
    return {
        "name": "one-device",
        "model": model,
        "data": {"kind": "synthetic", "num_documents": 200, "document_len": [3, 40], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"microbatches": MICROBATCHES // replicas, **(pipeline or {})},
        "train": base | (train or {}),
    }


def pipelines() -> dict[str, dict[str, Any]]:
    """Returns a job for every schedule on two ranks, with lookahead 0 and 2."""
    found = {}
    for name in SCHEDULES.names():
        stages = schedule_named(name).nearest_stages(1)
        for lookahead in (0, 2):
            pipeline = {"schedule": name, "stages_per_rank": stages, "lookahead": lookahead}
            found[f"{name}, lookahead {lookahead}"] = document(mesh={"pp": 2}, pipeline=pipeline)
    return found


TIED = {**LLAMA, "tie_embeddings": True}
EXACT: dict[str, dict[str, Any]] = {
    **pipelines(),
    "fsdp": document(mesh={"fsdp": 2}),
    "dp_replicate": document(mesh={"dp_replicate": 2}),
    "ring": document(mesh={"cp": 2, "cp_style": "ring"}),
    "ulysses": document(mesh={"cp": 2, "cp_style": "ulysses"}),
    "tied": document(TIED, mesh={"pp": 2}),
    "experts": document(EXPERTS, mesh={"pp": 2}),
    "experts, ep": document(EXPERTS, mesh={"fsdp": 2, "ep": 2}),
    "experts, ep over cp": document(EXPERTS, mesh={"cp": 2, "ep": 2}),
    "selective recomputation": document(mesh={"pp": 2}, train={"activation_checkpointing": "selective"}),
    "full recomputation": document(mesh={"pp": 2}, train={"activation_checkpointing": "full"}),
    "pp and fsdp": document(mesh={"pp": 2, "fsdp": 2}),
    "hsdp": document(mesh={"dp_replicate": 2, "fsdp": 2}),
    "pp and dp_replicate": document(mesh={"pp": 2, "dp_replicate": 2}),
    "pp and ring": document(mesh={"pp": 2, "cp": 2}),
    "pp, ep": document(EXPERTS, mesh={"pp": 2, "fsdp": 2, "ep": 2}),
}
ROUNDED: dict[str, dict[str, Any]] = {
    "bf16": document(mesh={"pp": 2}, train={"precision": "bf16"}),
    "bf16, fsdp": document(mesh={"fsdp": 2}, train={"precision": "bf16"}),
    "bf16, ring": document(mesh={"cp": 2}, train={"precision": "bf16"}),
    "bf16 messages": document(mesh={"pp": 2}, pipeline={"wire": {"dtype": "bf16"}}),
    "int8 messages": document(mesh={"pp": 2}, pipeline={"wire": {"compression": "int8"}}),
    "int8 sums": document(mesh={"dp_replicate": 2}, train={"sync": {"kind": "int8"}}),
    "int8 sums, pp": document(mesh={"pp": 2, "dp_replicate": 2}, train={"sync": {"kind": "int8"}}),
    "compiled": document(mesh={"pp": 2}, train={"compile": True, "activation_checkpointing": "full"}),
}
JOBS = {**EXACT, **ROUNDED}
TOGETHER = 8
QUICK = ["fsdp", "int8 messages"] if DEVICE == "cpu" else list(JOBS)
"""Without a GPU a few jobs show that the file works: `tests/ranks` compares all of this on CPUs."""


def world_of(job: dict[str, Any]) -> int:
    return Mesh.of(parse_job(job).mesh).world


@cache
def reference(kind: str) -> dict[str, Any]:
    models = {"llama": LLAMA, "tied": TIED, "qwen3_moe": EXPERTS}
    return train(document(models[kind]), 1, "cpu")


def batches() -> list[tuple[str, ...]]:
    """Returns the jobs in groups that run in the same processes: of one world, all quick or none.
    On a GPU each job makes communicators anew, and the processes have 240 s. "compiled" is
    alone."""
    groups: dict[tuple[int, bool, bool], list[str]] = {}
    for name, job in JOBS.items():
        groups.setdefault((world_of(job), name in QUICK, name == "compiled"), []).append(name)
    return [tuple(names[at : at + TOGETHER]) for names in groups.values() for at in range(0, len(names), TOGETHER)]


@cache
def results(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    world = world_of(JOBS[names[0]])
    found = run_in_turn_on_one_device(world, train_without_syncs, [(JOBS[name],) for name in names])
    return {name: merged(ranks) for name, ranks in zip(names, found, strict=True)}


def train_without_syncs(rank: int, world: int, port: int, job: dict[str, Any]) -> dict[str, Any]:
    """Trains one step. On CUDA, whatever makes the host wait for the device between the first
    forward and the last backward raises an error."""
    run = ProgramRuntime.run

    def strictly(runtime: ProgramRuntime, *arguments: Any, **more: Any) -> Any:
        # Experts read how many rows each of them gets, once per layer.
        without = DEVICE != "cpu" and job["model"]["kind"] == "llama"
        if without:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return run(runtime, *arguments, **more)
        finally:
            if without:
                torch.cuda.set_sync_debug_mode("default")

    ProgramRuntime.run = strictly  # type: ignore[method-assign]
    try:
        return train_steps(rank, world, port, job, 1, DEVICE)
    finally:
        ProgramRuntime.run = run  # type: ignore[method-assign]


def compared(name: str, bound: float) -> None:
    job = JOBS[name]
    kind = "tied" if job["model"].get("tie_embeddings") else job["model"]["kind"]
    names = next(names for names in batches() if name in names)
    assert_close(results(names)[name], reference(kind), bound)


@pytest.mark.parametrize("name", thinned(EXACT, [name for name in EXACT if name in QUICK]))
def test_ranks_on_one_device_give_the_numbers_of_one_rank_on_the_cpu(name: str) -> None:
    compared(name, FP32)


@pytest.mark.parametrize("name", thinned(ROUNDED, [name for name in ROUNDED if name in QUICK]))
def test_rounded_numbers_stay_near_those_of_one_rank_on_the_cpu(name: str) -> None:
    compared(name, ACROSS_PRECISIONS)
