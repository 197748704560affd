"""The cost of the runtime per microbatch, compared with torch's own schedule classes.

The stages compute almost nothing (one small linear layer), on two ranks, with many microbatches, so
the time is dispatch and messages. Both run in the same processes, in turn.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from benchmarks.throughput import torchrun
from raypp.planning.schedules.catalogue import build_program
from raypp.planning.seating import place_stages
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.stages.pipeline.runtime import ProgramRuntime

WIDTH, MICROBATCHES, TOKENS = 16, 64, 8


class Tiny(nn.Module):
    """A stage of one linear layer; the first stage also embeds its tokens."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH) if first else None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the stage: token ids `[B, T]` or activations `[B, T, C]`, to `[B, T, C]`."""
        return self.linear(self.embed(x) if self.embed is not None else x)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")


def ours(name: str, each: int, batch: list[Tensor]) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    placement = place_stages(world, world * each, "loop")
    ranks = [next(r for r, stages in enumerate(placement) if s in stages) for s in range(world * each)]
    forward, backward = dist.new_group(range(world)), dist.new_group(range(world))
    stages = [
        PlannedStage(Tiny(i == 0), i, world * each, rank_of_stage=ranks, hidden_size=WIDTH, dtype=torch.float32,
                     device=torch.device("cpu"), up_group=forward, down_group=backward)
        for i in placement[rank]
    ]  # fmt: skip
    runtime = ProgramRuntime(stages, build_program(name, world, each, MICROBATCHES), ranks, MICROBATCHES, loss)
    empty: list[dict[str, Any]] = [{} for _ in batch]
    return lambda: runtime.run(1, [TOKENS] * MICROBATCHES, batch, empty, batch)


def stock(each: int, batch: list[Tensor]) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    hidden = torch.empty(1, TOKENS, WIDTH, device="meta", requires_grad=True)
    total, cpu = world * each, torch.device("cpu")
    stages = [
        PipelineStage(Tiny(i == 0), i, total, cpu, input_args=tokens if i == 0 else hidden, output_args=hidden)
        for i in range(rank, total, world)
    ]
    whole = torch.cat(batch)
    if each == 1:
        schedule: Any = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(list(stages), MICROBATCHES, loss_fn=loss, scale_grads=False)
    arguments = (whole,) if rank == 0 else ()
    target = whole if rank == world - 1 else None
    return lambda: schedule.step(*arguments, target=target, losses=[], return_outputs=False)


def measure(step: Any, repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / repeats / MICROBATCHES * 1e6


def rank_main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = [torch.randint(0, WIDTH, (1, TOKENS)) for _ in range(MICROBATCHES)]
    pairs = {"1f1b": (ours("1f1b", 1, batch), stock(1, batch)),
             "interleaved_1f1b": (ours("interleaved_1f1b", 2, batch), stock(2, batch))}  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for name, (own, theirs) in pairs.items():
        own(), theirs()
        for _ in range(rounds):
            found[name].append((measure(own, 5), measure(theirs, 5)))
    Path(f"{os.environ['BENCH_OUT']}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        rank_main(int(sys.argv[1]))
        return
    options = begin(__doc__, rounds=(10, "turns of both"))
    found = torchrun("benchmarks.dispatch", [str(options.rounds)])[0]
    print(head("schedule | raypp, µs per microbatch | torch's class, µs | ratio, median (min to max)"))
    for name, pairs in found.items():
        a, b = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        print(f"| {name} | {a:.0f} | {b:.0f} | {spread([a / b for a, b in pairs])} |")


if __name__ == "__main__":
    main()
