"""What the parts of a job's model cost on one device of this machine: times of a clock, for `raypp plan --costs`.

`main` reads `{"job", "device"}` as JSON from standard input and prints the costs as one JSON object. Three stages are
timed on the job's own rows: two layers, two layers with the embedding, two layers with the head. Their differences are
the parts. The rank's other work of a step (reading, agreeing, the optimizer) is timed on a step of one process. On CPUs
messages are copied by the cores that compute: two processes pass some to and fro, and their CPU time is counted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raypp.data.loader import open_loader
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, RayppError
from raypp.models.init import initialise
from raypp.models.stage import build_stage, parameter_names
from raypp.parallel.apply import compute_dtype, prepare_stage
from raypp.parallel.groups import RankGroups, make_groups
from raypp.parallel.shard import write_whole
from raypp.pipeline.collate import StageBatch
from raypp.planning.links import message_bytes
from raypp.records import Requests
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job
from raypp.train.build import build_stages
from raypp.train.loss import token_loss_sum
from raypp.train.optimizer import build_optimizer
from raypp.train.parity import free_port, local_seat, one_process_job
from raypp.train.process_group import joined, pick_device
from raypp.train.reduce import GradientReducer
from raypp.train.step import ReadStep, StepRunner, Stopwatch

_LAYERS = 2
_ROUNDS = 5
_MICROBATCHES = 4
_MESSAGE_BYTES = 64 * 1024**2


def measure(job: Job, device_kind: str = "cpu") -> dict[str, Any]:
    """Times the parts of a job's model on one device.

    Args:
        job: The job; its mesh and schedule do not matter.
        device_kind: cpu or cuda.

    Returns:
        `layer`, `first`, `last` (each `forward` and `backward`, seconds of one microbatch), `optimizer_s` (of one
        parameter), `step_s` (of a step, whatever its size), `copy_s` (CPU time of one byte sent or received) and
        `device`, in words.
    """
    document = job_document(one_process_job(job))
    document["model"]["num_layers"] = _LAYERS
    document["pipeline"]["microbatches"] = _MICROBATCHES
    small = parse_job(document)
    port = free_port()
    seat = local_seat(0, 1, port, small, device=device_kind)
    device = pick_device(seat)
    with joined(seat, 60):
        groups = make_groups(seat.mesh_sizes, device.type, 1)
        whole = build_stages(small, groups, device, lambda action: None)
        optimizer = build_optimizer(whole.modules, small.train.optimizer, small.train.precision)
        reducer = GradientReducer(whole.modules, parameter_names(small.model))
        loader = open_loader(small, 0, 1)
        try:
            runner = StepRunner(small, seat, groups, whole, loader, optimizer, reducer, device)
            step_s, optimizer_s = _outside(runner, sum(p.numel() for m in whole.modules for p in m.parameters()))
            read = runner.read(Requests(), Stopwatch())
            middle, first, last = _stage_seconds(small, groups, device, runner, read)
        finally:
            loader.close()
    layer = tuple(max(0.0, seconds / _LAYERS) for seconds in middle)

    def part(forward: float, backward: float) -> dict[str, float]:
        return {"forward": forward, "backward": backward}

    return {
        "layer": part(*layer),
        "first": part(*(max(0.0, a - b) for a, b in zip(first, middle, strict=True))),
        "last": part(*(max(0.0, a - b) for a, b in zip(last, middle, strict=True))),
        "optimizer_s": optimizer_s,
        "step_s": step_s,
        "copy_s": copy_seconds(message_bytes(job)) if device.type == "cpu" else 0.0,
        "device": _device_name(device),
    }


def _outside(runner: StepRunner, parameters: int) -> tuple[float, float]:
    """Seconds of a step besides its schedule: fixed, and per parameter (sums, clipping, update)."""
    fixed, growing = [], []
    for step in range(1, _ROUNDS + 2):
        watch = Stopwatch()
        runner.run(step, runner.read(Requests(), watch), watch)
        if step > 1:
            growing.append(watch.parts["reduce"] + watch.parts["optimizer"])
            fixed.append(watch.parts["data"] + watch.parts["negotiate"])
    return statistics.median(fixed), statistics.median(growing) / parameters


def _stage_seconds(
    job: Job, groups: RankGroups, device: torch.device, runner: StepRunner, read: ReadStep
) -> list[tuple[float, float]]:
    """Forward and backward of a microbatch through two layers: alone, behind the embedding, before the head.

    The three take turns, so that a machine that gets slower does so for all.
    """
    stages = [_stage(job, groups, device, first=first, last=last) for first, last in ((0, 0), (1, 0), (0, 1))]
    taken: list[list[tuple[float, float]]] = [[] for _ in stages]
    batches = runner.batches(read)
    for turn in range(_ROUNDS + 1):
        for number, stage in enumerate(stages):
            for batch in batches:
                times = _one(stage, batch, job, device, first=number == 1, last=number == 2)
                if turn:
                    taken[number].append(times)
            stage.zero_grad()
    return [(statistics.median(f for f, _ in times), statistics.median(b for _, b in times)) for times in taken]


def _stage(job: Job, groups: RankGroups, device: torch.device, *, first: int, last: int) -> nn.Module:
    stage = build_stage(job.model, range(_LAYERS), first=bool(first), last=bool(last))
    mesh = groups.mesh["fsdp"] if job.train.precision == "bf16" else None
    stage = prepare_stage(stage, job, mesh, device, groups)
    initialise(stage, job.model, job.train.seed, write_whole)
    return stage


def _one(
    stage: nn.Module, batch: StageBatch, job: Job, device: torch.device, *, first: bool, last: bool
) -> tuple[float, float]:
    arguments = batch.stage_arguments()
    shape = (*batch.tokens_BT.shape, job.model.hidden_size)
    dtype = compute_dtype(job)
    given = batch.tokens_BT if first else torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else _nothing
    # One thread's own time: what others do on this machine does not count.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    wait()
    start = clock()
    output = stage(given, **arguments)
    if last:
        output = token_loss_sum(output, batch.labels_BT)
    wait()
    middle = clock()
    output.backward(None if last else torch.ones_like(output))
    wait()
    return middle - start, clock() - middle


def copy_seconds(size: int) -> float:
    """CPU seconds that one byte of a message between two gloo ranks takes from either of them.

    Args:
        size: Bytes of a message.
    """
    port = free_port()
    other = multiprocessing.get_context("spawn").Process(target=_pass_messages, args=(1, port, size), daemon=True)
    other.start()
    seconds = _pass_messages(0, port, size)
    other.join(60)
    return seconds


def _pass_messages(rank: int, port: int, size: int) -> float:
    """Sends and receives messages at once, as a stage in the middle of its step does; CPU seconds of a byte."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    count = max(16, min(256, _MESSAGE_BYTES // size))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    out, into = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    groups = [dist.new_group([0, 1]) for _ in range(2)]  # one for each direction
    taken = 0.0
    for _ in range(2):  # the first time, sockets grow their buffers
        start = time.process_time()
        for _ in range(count):
            works = [dist.isend(out, 1 - rank, groups[rank]), dist.irecv(into, 1 - rank, groups[1 - rank])]
            for work in works:
                if work is not None:
                    work.wait()
        taken = (time.process_time() - start) / (2 * count * size)
    dist.destroy_process_group()
    return taken


def _nothing() -> None:
    pass


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the request, prints the answer."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    request: Mapping[str, Any] = json.loads(sys.stdin.read())
    job = parse_job(request["job"])
    torch.set_num_threads(max(1, int(job.resources.cpus_per_rank)))
    kind = request.get("device") or "auto"
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        answer = measure(job, kind)
    except RayppError as error:
        print(json.dumps({"error": "\n".join(problem.what for problem in error.problems)}))  # noqa: T201
        return EXIT_RUN_FAILED
    print(json.dumps(answer))  # noqa: T201
    return EXIT_OK
