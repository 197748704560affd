"""Measures the CPU time that gloo's messages and sharded weights take from the cores that compute.

Two processes on this machine exchange messages, and gather and sum weights with the shapes of one
layer. Counted is the CPU time of a process with all its threads, not the time on the wire.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from raypp.models.stage import build_stage
from raypp.parallel.apply import prepare_stage
from raypp.parallel.late_sums import LateSums
from raypp.planning.end_weights import activation_bytes, sum_bytes
from raypp.planning.machines import message_bytes
from raypp.ports import free_port
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job

COPIES = ("copy_s", "gather_s", "sum_s")
_MESSAGE_BYTES = 64 * 1024**2
_ROUNDS = 5
_BLOCKS = 2
_MOST_WEIGHTS = 16 * 1024**2
"""Per block. A larger layer is cut down: the cost per weight hardly depends on their number."""


def copying_seconds(job: Job) -> dict[str, float]:
    """Measures the CPU seconds that moving data takes from each of two gloo ranks.

    Returns:
        `copy_s` per byte of a message sent or received, `gather_s` per weight that FSDP gathers,
        and `sum_s` per weight whose gradient it sums: copies and additions, without the messages.
    """
    document, port = job_document(job), free_port()
    document["train"] |= {"compile": False, "activation_checkpointing": "none"}  # nothing is computed
    other = multiprocessing.get_context("spawn").Process(target=_one_of_two, args=(1, port, document), daemon=True)
    other.start()
    seconds = _one_of_two(0, port, document)
    other.join(60)
    return seconds


def _one_of_two(rank: int, port: int, document: dict[str, Any]) -> dict[str, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    job = parse_job(document)
    copy_s = _message_seconds(rank, message_bytes(job))
    gather_s, sum_s = _weight_seconds(job)
    dist.destroy_process_group()
    # Each of two ranks sends the other half of everything and receives as much.
    gather_s, sum_s = gather_s - activation_bytes(job) * copy_s, sum_s - sum_bytes(job) * copy_s
    return dict(zip(COPIES, (copy_s, max(0.0, gather_s), max(0.0, sum_s)), strict=True))


def _message_seconds(rank: int, size: int) -> float:
    """Returns the CPU seconds per byte of messages sent and received at once, as in a step."""
    count = max(16, min(256, _MESSAGE_BYTES // size))
    out, into = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    groups = [dist.new_group([0, 1]) for _ in range(2)]  # one for each direction
    taken = 0.0
    for _ in range(2):  # in the first round, sockets grow their buffers
        start = time.process_time()
        for _ in range(count):
            works = [dist.isend(out, 1 - rank, groups[rank]), dist.irecv(into, 1 - rank, groups[1 - rank])]
            for work in works:
                if work is not None:
                    work.wait()
        taken = (time.process_time() - start) / (2 * count * size)
    return taken


class _Weights(nn.Module):
    """Weights with the shapes of a layer; the forward adds the sum of each to its input."""

    def __init__(self, shapes: list[torch.Size], share: float) -> None:
        super().__init__()
        sizes = [(max(1, round(shape[0] * share)), *shape[1:]) for shape in shapes]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Adds every weight's sum to `x`, `[...]`."""
        for weight in self.weights:
            x = x + weight.sum()
        return x


def _weight_seconds(job: Job) -> tuple[float, float]:
    """Returns CPU seconds per weight of a sharded stage: to gather it, and to sum its gradient."""
    plain = _stage_of_weights(job)
    sharded = prepare_stage(_stage_of_weights(job), job, init_device_mesh("cpu", (2,)), torch.device("cpu"))
    for weight in sharded.module.parameters():
        nn.init.zeros_(weight)
    count = sum(weight.numel() for weight in plain.parameters())
    ways = [
        lambda: _gather(sharded.module),
        lambda: _pass(sharded.module, sharded.late_sums),
        lambda: _pass(plain, None),
    ]
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(_ROUNDS + 1):
        for way, times in zip(ways, taken, strict=True):
            seconds = _cpu_seconds(way)
            if turn:
                times.append(seconds)
    gather, both, neither = (statistics.median(times) / count for times in taken)
    return gather, both - neither - gather


def _stage_of_weights(job: Job) -> nn.Module:
    with torch.device("meta"):
        layer = build_stage(job.model, range(1), first=False, last=False)
    shapes = [weight.shape for weight in layer.parameters()]
    share = min(1.0, _MOST_WEIGHTS / sum(shape.numel() for shape in shapes))
    stage = nn.Sequential()
    stage.model = nn.Sequential()
    stage.model.layers = nn.Sequential(*(_Weights(shapes, share) for _ in range(_BLOCKS)))
    return stage


def _gather(stage: nn.Module) -> None:
    blocks = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for block in blocks:
        block.unshard()
    for block in blocks:
        block.reshard()


def _pass(stage: nn.Module, late_sums: LateSums | None) -> None:
    """Runs a forward and a backward, and sums the gradients."""
    stage(torch.zeros(1, requires_grad=True)).backward()
    if late_sums is not None:
        late_sums.wait()
    stage.zero_grad()


def _cpu_seconds(way: Callable[[], None]) -> float:
    dist.barrier()
    start = time.process_time()
    way()
    return time.process_time() - start
