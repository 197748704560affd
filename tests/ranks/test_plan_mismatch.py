"""A tensor whose length differs from the step's plan ends the step with an error that names it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn

from raypp.planning.schedules.catalogue import build_program
from raypp.stages.pipeline.planned_stage import PlanMismatch, PlannedStage
from raypp.stages.pipeline.runtime import ProgramRuntime

WIDTH, ROWS, LENGTHS = 4, 2, [8, 16]


class Layer(nn.Module):
    """A stage whose output may be shorter than its input, or independent of it."""

    def __init__(self, *, shorter_by: int = 0, detached: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shorter_by, self.detached = shorter_by, detached

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : x.shape[1] - self.shorter_by]
        return self.linear(x.detach() if self.detached else x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum()


def step_of(
    rank: int,
    world: int,
    port: int,
    faulty: int = -1,
    fault: dict[str, Any] | None = None,
    lengths: tuple[list[int], ...] = (LENGTHS, LENGTHS),
    stages_per_rank: int = 1,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Returns how a step of a two-rank pipeline, or of two stages on one rank, ends here."""
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    forward, backward = (dist.new_group(list(range(world))) for _ in range(2))
    count = world * stages_per_rank
    ranks = [stage % world for stage in range(count)]
    stages = []
    for index in range(rank, count, world):
        module = (Layer(**(fault or {})) if index == faulty else Layer()).to(dtype)
        stages.append(
            PlannedStage(
                module, index, count, rank_of_stage=ranks, hidden_size=WIDTH, dtype=dtype,
                device=torch.device("cpu"), up_group=forward, down_group=backward,
            )
        )  # fmt: skip
    program = build_program("gpipe" if stages_per_rank == 1 else "looped_bfs", world, stages_per_rank, 2)
    runtime = ProgramRuntime(stages, program, ranks, 2, loss)
    inputs = [torch.ones(ROWS, length, WIDTH, dtype=dtype, requires_grad=True) for length in lengths[rank]]
    try:
        runtime.run(ROWS, lengths[rank], inputs, [{}, {}], inputs)
    except PlanMismatch as error:
        return str(error)
    except RuntimeError as error:
        return "lost its peer" if "onnection" in str(error) else f"unexpected: {error}"
    return "fine"


def test_what_a_rank_computed_and_must_not_send_is_named() -> None:
    sender, receiver = run_ranks(2, step_of, 0, {"shorter_by": 3})
    assert sender == (
        "stage 0: activations of microbatch 0 for stage 1 are (2, 5, 4) torch.float32, "
        "the plan says (2, 8, 4) torch.float32"
    )
    assert receiver == "lost its peer"


def test_a_gradient_that_a_rank_owes_and_has_not_is_named() -> None:
    owing, sender = run_ranks(2, step_of, 1, {"detached": True})
    assert sender == "stage 1 has no gradients of microbatch 0 for stage 0"
    assert owing == "lost its peer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_message_shorter_than_planned_is_named_by_its_receiver(dtype: torch.dtype) -> None:
    _, receiver = run_ranks(2, step_of, -1, None, (LENGTHS, [8, 24]), 1, dtype)
    assert receiver == (
        "stage 1: activations of microbatch 1 from stage 0 are fewer than the plan says, (2, 24, 4): "
        "the ranks follow different plans"
    )


def test_stages_of_one_rank_are_held_to_the_plan_too() -> None:
    (alone,) = run_ranks(1, step_of, 0, {"shorter_by": 1}, (LENGTHS,), 2)
    assert alone.startswith("stage 1: activations of microbatch 0 from this rank's other stage are (2, 7, 4)")
    (alone,) = run_ranks(1, step_of, 1, {"detached": True}, (LENGTHS,), 2)
    assert alone == "stage 1 has no gradients of microbatch 0 for stage 0"
    assert run_ranks(2, step_of) == ["fine", "fine"]
