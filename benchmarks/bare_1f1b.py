"""The script that raypp is compared with: torch's Schedule1F1B under torchrun, with the same model.

Writes one JSON file per rank: seconds and CPU seconds of every step.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.paced import sleep_instead
from benchmarks.sizes import MICROBATCHES, ROWS, SEQ_LEN, model_options
from benchmarks.turns import Gate
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.initial_values import initial_value
from raypp.stages.models.stage import build_stage


class FixedShapes(torch.nn.Module):
    """A stage with the fixed arguments of a packed batch in which every row is one document."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.positions = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)
        self.documents = PackedDocuments.of_lengths((SEQ_LEN,) * ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the stage: token ids `[B, T]` or activations `[B, T, C]`, to `[B, T, C or V]`."""
        return self.stage(x, self.positions, self.documents)


def build(rank: int, cut: list[int]) -> tuple[torch.nn.Module, PipelineStage]:
    options = model_options()
    start = sum(cut[:rank])
    stage = build_stage(options, range(start, start + cut[rank]), first=rank == 0, last=rank == len(cut) - 1)
    stage = stage.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, options, 0))
    activations = torch.empty(ROWS, SEQ_LEN, options.hidden_size, device="meta", requires_grad=True)
    tokens = torch.empty(ROWS, SEQ_LEN, dtype=torch.int64, device="meta")
    logits = torch.empty(ROWS, SEQ_LEN, options.vocab_size, device="meta", requires_grad=True)
    module, first, last = FixedShapes(stage), rank == 0, rank == len(cut) - 1
    ends = (tokens if first else activations, logits if last else activations)
    return module, PipelineStage(module, rank, len(cut), torch.device("cpu"), *ends)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", default="4,4")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--pace", type=float, help="sleep this many seconds per layer (benchmarks.paced)")
    arguments = parser.parse_args()
    if arguments.pace:
        sleep_instead(arguments.pace)
    cut = [int(part) for part in arguments.cut.split(",")]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module, stage = build(rank, cut)
    microbatches = arguments.microbatches
    tokens_per_step = microbatches * ROWS * SEQ_LEN

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum") / tokens_per_step

    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, model_options().vocab_size, (microbatches * ROWS, SEQ_LEN), generator=generator)
    wall, cpu = [], []
    gate = Gate()
    for _ in range(arguments.steps):
        gate.step_begins()
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch, return_outputs=False)
        else:
            schedule.step(target=batch if rank == last else None, losses=losses, return_outputs=False)
        square = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    if os.environ.get("BENCH_OUT"):
        Path(f"{os.environ['BENCH_OUT']}.{rank}").write_text(json.dumps({"wall": wall, "cpu": cpu}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
