"""On CPUs, gradient sums of sharded stages begin during the last backward and equal the sums over
all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_in_turn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from raypp.parallel.late_sums import reduce_within_backward, sum_by_parts
from raypp.parallel.shard import local_part

BLOCKS, WIDTH, MICROBATCHES = 3, 4, 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def batch(rank: int, microbatch: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def sharded_step(rank: int, world: int, port: int, early: bool) -> dict[str, Any]:
    """Runs a step like torch's pipelining. Returns the number of sums in progress after the last
    backward, and the gradients."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    # Before the sums: rank 0 serves the store, and nothing after them keeps it from leaving first.
    alone, _ = dist.new_subgroups(1)
    stage: Any = model()
    for block in stage:
        fully_shard(block, mesh=mesh)
    fully_shard(stage, mesh=mesh)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    late = sum_by_parts(stage, late=True)
    for microbatch in range(MICROBATCHES):
        output = stage(batch(rank, microbatch).requires_grad_())
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(False)
        if early and microbatch == MICROBATCHES - 1:
            reduce_within_backward(stage, output)
        output.square().sum().backward()
    under_way = late.under_way
    PipelineStage(stage, 0, 1, torch.device("cpu"), group=alone).perform_reduce_grad(1)
    late.wait()
    gradients = [local_part(parameter.grad) for parameter in stage.parameters()]
    dist.destroy_process_group()
    return {"under_way": under_way, "gradients": gradients}


@pytest.mark.parametrize("world", [2, 3])
def test_each_blocks_sum_begins_within_the_last_backward_and_is_taken_in_the_order_of_the_ranks(world: int) -> None:
    early, after = run_in_turn(world, sharded_step, [(True,), (False,)])
    assert [one["under_way"] for one in early] == [BLOCKS] * world
    assert [one["under_way"] for one in after] == [0] * world
    for one, other in zip(early, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["gradients"], other["gradients"], strict=True))
    total: list[Tensor] = []
    for rank in range(world):
        own = model()
        for microbatch in range(MICROBATCHES):
            own(batch(rank, microbatch)).square().sum().backward()
        gradients = [parameter.grad for parameter in own.parameters() if parameter.grad is not None]
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
    for number, whole in enumerate(total):
        parts = [one["gradients"][number] for one in early]
        assert torch.equal(torch.cat([part for part in parts if part.numel()]), whole)
