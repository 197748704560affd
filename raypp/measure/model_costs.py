"""Measures the costs of a model's parts on one device of this machine, for `raypp plan --costs`.

Three stages are timed on the job's own rows: two layers, two layers with the embedding, two layers
with the head. The costs of the parts are their differences. The rank's other work in a step
(reading, agreeing, the optimizer) is timed on a step of one process. On CPUs the cores that compute
also copy (`copying_seconds`).

On CPUs the parts are compared by the thread's CPU time, which a momentary disturbance does not
change. All of them are then scaled by the ratio of wall time to CPU time of the whole measurement:
a host that gives its virtual machines only 90 % of a core does so in training, too. The ratio is
part of the answer, because another program may have caused it.

Legend: B rows of a microbatch, T tokens, C hidden size.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from raypp.measure.parity import one_process_job
from raypp.models.initial_values import initialise
from raypp.models.loss import Targets, token_loss_sum
from raypp.models.stage import build_stage, computes_loss
from raypp.parallel.apply import compute_dtype, prepare_stage
from raypp.parallel.compute_copies import computing, fill_wide_gradients
from raypp.parallel.late_sums import LateSums
from raypp.parallel.rank_groups import RankGroups
from raypp.parallel.shard import local_rows
from raypp.pipeline.collate import StageBatch
from raypp.planning.machines import message_bytes
from raypp.ports import free_port
from raypp.records import Requests
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job
from raypp.torch_private import stage_backward_input, stage_backward_weight
from raypp.train.assemble import assemble
from raypp.train.own_seat import local_seat
from raypp.train.step import StepRunner, Stopwatch

_LAYERS = 2
_ROUNDS = 5
_MICROBATCHES = 4
COPIES = ("copy_s", "gather_s", "sum_s")
_MESSAGE_BYTES = 64 * 1024**2
_BLOCKS = 2
_MOST_WEIGHTS = 16 * 1024**2
"""Per block. A larger layer is cut down: the cost per weight hardly depends on their number."""


@contextmanager
def open_meter(job: Job, device_kind: str = "cpu") -> Iterator[Meter]:
    """Prepares a meter that times the parts of a job's model on one device, any number of times.

    Small or steady costs are measured here, once: a step's work outside its schedule and, on CPUs,
    the cost of moving data.

    Args:
        job: The job; its mesh and schedule do not matter.
        device_kind: cpu or cuda.
    """
    job = job.for_device(device_kind)
    copies = copying_seconds(job) if device_kind == "cpu" else dict.fromkeys(COPIES, 0.0)
    document = job_document(one_process_job(job))
    document["model"]["num_layers"] = _LAYERS
    document["pipeline"]["microbatches"] = _MICROBATCHES
    if job.model.lora is not None:  # without the numbers of layers
        targets = [target.rpartition(".")[2] for target in job.model.lora.targets]
        document["model"]["lora"]["targets"] = targets
    small = parse_job(document)
    seat = local_seat(0, 1, free_port(), small, device=device_kind)
    with assemble(small, seat, hang_timeout_s=60) as rank:
        runner = StepRunner(rank)
        trained = sum(p.numel() for m in rank.built.modules for p in m.parameters() if p.requires_grad)
        steady = _outside(runner, trained) | copies
        read = runner.read(Requests(), Stopwatch())
        yield Meter(rank.job, rank.groups, rank.device, runner.batches(read, 1), steady)


class Meter:
    """Times the parts of a model; created by `open_meter`.

    `steady`: `optimizer_s`, `step_s` and the results of `copying_seconds`.
    """

    def __init__(
        self,
        job: Job,
        groups: RankGroups,
        device: torch.device,
        batches: Sequence[StageBatch],
        steady: Mapping[str, float],
    ) -> None:
        self._job, self._device, self._batches, self._steady = job, device, batches, steady
        self._stages = [_stage(job, groups, device, first=first, last=last) for first, last in ((0, 0), (1, 0), (0, 1))]

    def take(self, rounds: int = _ROUNDS) -> dict[str, Any]:
        """Times all parts.

        Args:
            rounds: How often each part is timed on every microbatch.

        Returns:
            `layer`, `first`, `last` (each with `forward` and `backward`, seconds per microbatch);
            `optimizer_s` (per parameter); `step_s` (per step, whatever its size); `copy_s`,
            `gather_s` and `sum_s` (from `copying_seconds`; zero on GPUs, which copy while they
            compute); `input_share` and `weight_share` (time of a layer's backward halves, run
            separately, relative to the whole backward; 1 and 0 where backwards cannot be split:
            blocks are compiled or recomputed selectively); `stretched` (wall seconds per CPU second
            of the parts); `device`, its description, and `kind`, cpu or cuda.
        """
        (middle, first, last, *split), stretched = self._seconds(rounds)
        halves = split[0] if split else (middle[1], 0.0)

        def part(forward: float, backward: float) -> dict[str, float]:
            return {"forward": max(0.0, forward), "backward": max(0.0, backward)}

        return {
            "layer": part(middle[0] / _LAYERS, middle[1] / _LAYERS),
            "first": part(first[0] - middle[0], first[1] - middle[1]),
            "last": part(last[0] - middle[0], last[1] - middle[1]),
            **self._steady,
            **{name: stretched * self._steady[name] for name in COPIES},
            "input_share": halves[0] / middle[1],
            "weight_share": halves[1] / middle[1],
            "stretched": stretched,
            "device": _device_name(self._device),
            "kind": self._device.type,
        }

    def _seconds(self, rounds: int) -> tuple[list[tuple[float, float]], float]:
        """Times a microbatch through two layers: alone, after the embedding, before the head.

        Also times the two halves of a backward of the layers alone. The measurements take turns, so
        that a slowdown of the machine affects all of them.

        Returns:
            The two seconds of each measurement, and the ratio of wall time to CPU time.
        """
        ways = [partial(_one, stage, first=n == 1, last=n == 2) for n, stage in enumerate(self._stages)]
        train = self._job.train
        if not train.compiles and train.activation_checkpointing != "selective":
            ways.append(partial(_halves, self._stages[0]))
        taken: list[list[tuple[float, float]]] = [[] for _ in ways]
        own = passed = 0.0
        with computing(self._stages):
            for turn in range(rounds + 1):
                for way, pairs in zip(ways, taken, strict=True):
                    for batch in self._batches if turn else self._batches[:1]:  # the first turn allocates
                        one, other, wall = way(batch, self._job, self._device)
                        if turn:
                            pairs.append((one, other))
                            own, passed = own + one + other, passed + wall
                    for stage in self._stages:
                        stage.zero_grad()
        stretched = max(1.0, passed / own)
        return [
            (
                stretched * statistics.median(one for one, _ in times),
                stretched * statistics.median(two for _, two in times),
            )
            for times in taken
        ], stretched


def _outside(runner: StepRunner, parameters: int) -> dict[str, float]:
    """Returns seconds outside the schedule, per step and per parameter (`optimizer_s`)."""
    fixed, growing = [], []
    for step in range(1, _ROUNDS + 2):
        watch = Stopwatch(runner.device)
        runner.run(step, runner.read(Requests(), watch), watch)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
            watch.read()
        if step > 1:
            growing.append(watch.parts["reduce"] + watch.parts["optimizer"])
            fixed.append(watch.parts["data"] + watch.parts["negotiate"])
    return {"step_s": statistics.median(fixed), "optimizer_s": statistics.median(growing) / parameters}


def _stage(job: Job, groups: RankGroups, device: torch.device, *, first: int, last: int) -> nn.Module:
    stage = build_stage(job.model, range(_LAYERS), first=bool(first), last=bool(last))
    stage = prepare_stage(stage, job, None, device, groups).module
    initialise(stage, job.model, job.train.seed, local_rows)
    return stage


def _one(
    stage: nn.Module, batch: StageBatch, job: Job, device: torch.device, *, first: bool, last: bool
) -> tuple[float, float, float]:
    """Returns the seconds of a forward, of a backward, and the wall time of both."""
    given = batch.tokens_BT if first else _activations(batch, job, device).requires_grad_()
    clock = _Clock(device)
    own_loss = last and computes_loss(stage)
    output = stage(given, **batch.stage_arguments(), **({"targets": Targets(batch.labels_BT)} if own_loss else {}))
    if last and not own_loss:
        output = token_loss_sum(output, batch.labels_BT)
    clock.lap()
    output.backward(None if last else torch.ones_like(output))
    return clock.laps()


def _halves(stage: nn.Module, batch: StageBatch, job: Job, device: torch.device) -> tuple[float, float, float]:
    """Returns the seconds of a backward's input half, of its weight half, and their wall time."""
    given = _activations(batch, job, device).requires_grad_()
    output = stage(given, **batch.stage_arguments())
    gradient = torch.ones_like(output)
    fill_wide_gradients([stage])
    clock = _Clock(device)
    for_weights = backward_for_input(stage, output, gradient, given)
    clock.lap()
    for_weights()
    return clock.laps()


def _activations(batch: StageBatch, job: Job, device: torch.device) -> Tensor:
    """Returns random activations `[B, T, C]` in the compute dtype."""
    return torch.randn((*batch.tokens_BT.shape, job.model.hidden_size), dtype=compute_dtype(job), device=device)


class _Clock:
    """Measures two laps in CPU time if one thread does all the work, and their wall time."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.thread_time if alone else time.perf_counter
        self._wait()
        self._begun, self._times = time.perf_counter(), [self._now()]

    def lap(self) -> None:
        self._wait()
        self._times.append(self._now())

    def laps(self) -> tuple[float, float, float]:
        """Ends the second lap; returns the seconds of both laps and the wall time."""
        self.lap()
        start, middle, end = self._times
        return middle - start, end - middle, time.perf_counter() - self._begun


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers `{"job", "device"}`: see `open_meter` and `Meter.take`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    job, kind = parse_job(request["job"]), request.get("device") or "auto"
    torch.set_num_threads(max(1, int(job.resources.cpus_per_rank)))
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    with open_meter(job, kind) as meter:
        return meter.take()


def backward_for_input(module: nn.Module, output: Tensor, gradient: Tensor, given: Tensor) -> Callable[[], Any]:
    """Computes the input's gradient and stores it in `given.grad`.

    Args:
        module: The module that computed the output.
        output: `module(given)`, `[B, T, C]` or `[B, T, V]`; the two halves consume its graph.
        gradient: The gradient of the output, of its shape.
        given: The input, `[B, T, C]`; requires a gradient.

    Returns:
        The other half: adds to the gradients of the module's parameters. Call it once.
    """
    _, groups = stage_backward_input([output], [gradient], [given], module.parameters())
    return partial(stage_backward_weight, module.parameters(), groups)


# The CPU time that gloo's messages and sharded weights take from the cores that compute.
#
# Two processes on this machine exchange messages, and gather and sum weights with the shapes of one
# layer. Counted is the CPU time of a process with all its threads, not the time on the wire.


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
    gather_s, sum_s = gather_s - job.train.dtypes.compute.bytes * copy_s, sum_s - job.train.dtypes.reduce.bytes * copy_s
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
