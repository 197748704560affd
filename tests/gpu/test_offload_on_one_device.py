"""Offloading on a device: the same bits as without, in less of the device's memory.

The numbers are compared with and without a GPU (`ranks.py`), the memory with one only.
"""

import copy
from typing import Any

import pytest
import torch
from comparison import assert_identical
from harness import run_ranks
from ranks import DEVICE, run_in_turn_on_one_device
from test_mesh_on_one_device import LLAMA, document
from training import merged, seat_of, train_steps

from raypp.job.load import parse_job
from raypp.planning import offload
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.rank.assemble import assemble
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Requests
from raypp.stages.parallel.host_copies import lock_pages, unlock_pages

STATE, INPUTS = {"optimizer": {"offload": True}}, {"activation_checkpointing": "offload"}
KEPT = {"activation_checkpointing": "full"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, fsdp": ({"mesh": {"fsdp": 2}, "train": {"precision": "bf16"}}, STATE),
    "muon, pp": ({"mesh": {"pp": 2}, "train": {"optimizer": {"kind": "muon"}}}, STATE),
    "1f1b": ({"mesh": {"pp": 2}, "train": KEPT}, INPUTS),
    "zbv": ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "stages_per_rank": 2}, "train": KEPT}, INPUTS),
}


def offloaded(source: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(source)
    for key, value in train.items():
        found["train"][key] = {**found["train"].get(key, {}), **value} if isinstance(value, dict) else value
    return found


def steps(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    offload.BLOCK = 5000
    return train_steps(rank, world, port, source, 3, DEVICE)


@pytest.mark.slow
def test_the_device_computes_the_same_bits() -> None:
    jobs = [document(**settings) for settings, _ in PAIRS.values()]
    both = [*jobs, *(offloaded(job, train) for job, (_, train) in zip(jobs, PAIRS.values(), strict=True))]
    found = [merged(ranks) for ranks in run_in_turn_on_one_device(2, steps, [(job,) for job in both])]
    for plain, moved in zip(found[: len(jobs)], found[len(jobs) :], strict=True):
        assert_identical(moved, plain)


def held(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, int]:
    """Returns bytes of the device: between two updates, and at most in a step's schedule."""
    job = parse_job(source)
    with assemble(
        decide(job, Facts("cuda")), seat_of(rank, world, port, job, device="cuda:0"), hang_timeout_s=60
    ) as made:
        runner = StepRunner(made)
        for step in (1, 2):
            torch.cuda.reset_peak_memory_stats()
            watch = Stopwatch(made.device)
            runner.run(step, runner.read(Requests(), watch), watch)
        torch.cuda.synchronize()
        return {"between": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}


@pytest.mark.gpu
def test_the_device_holds_less() -> None:
    model = {**LLAMA, "num_layers": 8, "hidden_size": 512, "ffn_size": 2048}
    pipeline = {"schedule": "gpipe", "microbatches": 8}
    plain = document(model, pipeline=pipeline, train={"precision": "bf16", **KEPT})
    (before,) = run_ranks(1, held, plain)
    (state,) = run_ranks(1, held, offloaded(plain, STATE))
    parameters = 8 * (3 * 512 * 512 + 3 * 512 * 2048)  # and the ends
    assert before["between"] - state["between"] > 0.7 * 10 * parameters
    (inputs,) = run_ranks(1, held, offloaded(plain, INPUTS))
    assert inputs["peak"] < before["peak"]


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_leaves_no_error_for_the_next_kernel() -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    assert lock_pages(memory)
    try:
        assert not lock_pages(memory), "locked twice"
        assert int(torch.ones(3, device="cuda").sum()) == 3
    finally:
        unlock_pages(memory.data_ptr())
