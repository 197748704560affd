"""What a run on GPUs does otherwise changes no bit: a warm-up before the first step, and receives
posted in one order. Here gloo carries the messages and CPUs compute, by the same code."""

from __future__ import annotations

from typing import Any

import pytest
import test_experts
import torch
from comparison import assert_identical
from harness import run_in_turn
from test_mesh_does_not_change_numbers import document
from torch import Tensor
from training import merged, thinned

from raypp.measure.parity import train_some_steps
from raypp.parallel.shard import local_part
from raypp.records import Requests
from raypp.spec.load import parse_job
from raypp.train.assemble import assemble
from raypp.train.own_seat import local_seat
from raypp.train.step import StepRunner, Stopwatch
from raypp.train.warm_up import warm_up

pytestmark = pytest.mark.ranks
STEPS = 2


def trained(rank: int, world: int, port: int, job: dict[str, Any], like_cuda: bool) -> dict[str, Any]:
    """Trains some steps; `like_cuda`: with a warm-up and with receives as on NCCL."""
    parsed = parse_job(job)
    kept: dict[str, dict[str, Tensor]] = {}

    def change(step: int, runner: StepRunner) -> None:
        if like_cuda and step == 1:
            runner.warm = False
            runner.built.runtime.posting = "one_order"
            runner.built.runtime.load(runner.pipeline.program)

    reports = train_some_steps(parsed, local_seat(rank, world, port, parsed), STEPS, kept.__setitem__, before=change)
    assert ("warm_up" in reports[0].parts_s) is like_cuda
    assert not any("warm_up" in report.parts_s for report in reports[1:])
    weights = kept.pop("weights")
    return {
        "loss": [r.loss for r in reports],
        "grad_norm": [r.grad_norm for r in reports],
        "tokens": [r.tokens for r in reports],
        "extras": [r.extras for r in reports],
        "gradients": list(kept.values()),
        "weights": weights,
    }


def tied(**settings: Any) -> dict[str, Any]:
    found = document(microbatches=4, **settings)
    found["model"] |= {"num_layers": 4, "tie_embeddings": True}
    return found


def experts(mesh: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return test_experts.document(mesh=mesh, pipeline={"microbatches": 4}, **sections)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b, lookahead 2, int8": (2, document(pp=2, pipeline={"lookahead": 2, "wire": {"compression": "int8"}})),
    "interleaved, fsdp": (4, document(pp=2, fsdp=2, schedule="interleaved_1f1b", pipeline={"stages_per_rank": 2})),
    "zbv, replicas": (4, document(pp=2, dp_replicate=2, schedule="zbv", pipeline={"stages_per_rank": 2})),
    "bf16, recomputed": (2, document(fsdp=2, train={"precision": "bf16", "activation_checkpointing": "full"})),
    "bf16 weights, zbv": (
        2,
        document(pp=2, schedule="zbv", pipeline={"stages_per_rank": 2}, train={"precision": "bf16_pure"}),
    ),
    "tied, both ends": (2, tied(pp=2)),
    "tied, one stage": (1, tied()),
    "experts, ring": (4, experts({"pp": 2, "cp": 2, "ep": 2})),
    "experts, ulysses": (4, experts({"pp": 2, "cp": 2, "cp_style": "ulysses", "ep": 2})),
}


QUICK, GATE = ("1f1b, lookahead 2, int8",), ("bf16, recomputed",)


@pytest.mark.parametrize("name", thinned(CASES, QUICK, GATE))
def test_a_run_as_on_gpus_gives_the_same_bits(name: str) -> None:
    world, job = CASES[name]
    plain, other = run_in_turn(world, trained, [(job, False), (job, True)])
    assert_identical(merged(other), merged(plain))


def left_behind(rank: int, world: int, port: int, job: dict[str, Any]) -> list[str]:
    """Returns what a warm-up between two steps has changed."""
    parsed = parse_job(job)
    with assemble(parsed, local_seat(rank, world, port, parsed), hang_timeout_s=60) as made:
        runner = StepRunner(made)
        for step in (1, 2):
            if step == 2:
                before = state_of(runner)
                read = runner.read(Requests(), Stopwatch())
                warm_up(
                    runner.built, runner.pipeline.program, runner.batches(read)[0], runner.share, runner.router_losses
                )
                after = state_of(runner)
            else:
                runner.run(step, runner.read(Requests(), Stopwatch()), Stopwatch())
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def state_of(runner: StepRunner) -> dict[str, Tensor]:
    """Returns copies of weights, gradients, optimizer state, router sums and random state."""
    found = {"random": torch.get_rng_state(), "router": runner.router_losses.take()}
    for module in runner.built.modules:
        for name, parameter in module.named_parameters():
            found[name] = local_part(parameter).detach().clone()
            if parameter.grad is not None:
                found[f"{name}.grad"] = local_part(parameter.grad).clone()
            for key, value in runner.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = local_part(torch.as_tensor(value)).clone()
        for name, buffer in module.named_buffers():
            found[f"buffer {name}"] = buffer.clone()
    return found


def test_a_warm_up_changes_no_state() -> None:
    job = experts({"pp": 2, "fsdp": 2, "ep": 2}, model={"tie_embeddings": True})
    (found,) = run_in_turn(4, left_behind, [(job,)])
    assert found == [[]] * 4
