"""Measures the costs of a model's parts on one device of this machine, for `raypp plan --costs`.

Timed on the job's own rows are two layers, alone, with the embedding and with the head; the parts
are the differences. The rest of a step is timed on a step of one process.

Legend: B rows of a microbatch, T tokens, C hidden size.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypp.control.calls import Tell
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.planning.resolve import whole_backwards
from raypp.ports import free_port
from raypp.rank.assemble import assemble
from raypp.rank.device_check import facts_here
from raypp.rank.own_seat import local_seat
from raypp.rank.step.collate import StageBatch
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Requests
from raypp.stages.models.initial_values import initialise
from raypp.stages.models.loss import Targets, token_loss_sum
from raypp.stages.models.products import LaterGradients, weights_later
from raypp.stages.models.stage import build_stage, computes_loss
from raypp.stages.parallel.apply import compute_dtype, prepare_stage
from raypp.stages.parallel.compute_copies import computing, fill_wide_gradients
from raypp.stages.parallel.rank_groups import RankGroups
from raypp.stages.parallel.shard import local_rows
from raypp.tools.parity import one_process_job

_LAYERS = 2
_ROUNDS = 5
_MICROBATCHES = 4


@contextmanager
def open_meter(job: Job, device_kind: str = "cpu") -> Iterator[Meter]:
    """Prepares a meter that times the parts of a job's model on one device, any number of times.
    Small or steady costs are measured here, once: a step's work outside its schedule."""
    document = job_document(one_process_job(job))
    document["model"]["num_layers"] = _LAYERS
    document["pipeline"]["microbatches"] = _MICROBATCHES
    if job.model.lora is not None:  # without the numbers of layers
        targets = [target.rpartition(".")[2] for target in job.model.lora.targets]
        document["model"]["lora"]["targets"] = targets
    small = parse_job(document)
    seat = local_seat(0, 1, free_port(), small, device=device_kind)
    with assemble(decide(small, facts_here(seat)), seat, hang_timeout_s=60) as rank:
        runner = StepRunner(rank)
        trained = sum(p.numel() for m in rank.built.modules for p in m.parameters() if p.requires_grad)
        steady = _outside(runner, trained)
        read = runner.read(Requests(), Stopwatch())
        yield Meter(rank.job, rank.groups, rank.device, runner.batches(read, 1), steady)


class Meter:
    """Times the parts of a model; created by `open_meter`. `steady`: `optimizer_s` and `step_s`."""

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
        """Times all parts. `rounds`: how often each part is timed on every microbatch. Returns
        `layer`, `first`, `last` (each with `forward` and `backward`, seconds per microbatch);
        `optimizer_s` (per parameter); `step_s` (per step, whatever its size); `input_share` and
        `weight_share` (time of a layer's backward halves, run separately, relative to the whole
        backward; 1 and 0 where backwards cannot be split); `device`, its description, `kind`, cpu
        or cuda, and `precision`, of what was timed."""
        middle, first, last, *split = self._seconds(rounds)
        halves = split[0] if split else (middle[1], 0.0)

        def part(forward: float, backward: float) -> dict[str, float]:
            return {"forward": max(0.0, forward), "backward": max(0.0, backward)}

        return {
            "layer": part(middle[0] / _LAYERS, middle[1] / _LAYERS),
            "first": part(first[0] - middle[0], first[1] - middle[1]),
            "last": part(last[0] - middle[0], last[1] - middle[1]),
            **self._steady,
            "input_share": halves[0] / middle[1],
            "weight_share": halves[1] / middle[1],
            "device": _device_name(self._device),
            "kind": self._device.type,
            "precision": self._job.train.precision,
        }

    def _seconds(self, rounds: int) -> list[tuple[float, float]]:
        """Times a microbatch through two layers: alone, after the embedding, before the head. Also
        times the two halves of a backward of the layers alone. They take turns, so that a slowdown
        affects all. Returns the two seconds of each."""
        ways = [partial(_one, stage, first=n == 1, last=n == 2) for n, stage in enumerate(self._stages)]
        if not whole_backwards(self._job):
            ways.append(partial(_halves, self._stages[0]))
        taken: list[list[tuple[float, float]]] = [[] for _ in ways]
        with computing(self._stages):
            for turn in range(rounds + 1):
                for way, pairs in zip(ways, taken, strict=True):
                    for batch in self._batches if turn else self._batches[:1]:  # the first turn allocates
                        pair = way(batch, self._job, self._device)
                        if turn:
                            pairs.append(pair)
                    for stage in self._stages:
                        stage.zero_grad()
        return [(statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)) for pairs in taken]


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
) -> tuple[float, float]:
    """Returns the seconds of a forward and of a backward."""
    given = batch.tokens_BT if first else _activations(batch, job, device).requires_grad_()
    clock = _Clock(device)
    own_loss = last and computes_loss(stage)
    output = stage(given, **batch.stage_arguments(), **({"targets": Targets(batch.labels_BT)} if own_loss else {}))
    if last and not own_loss:
        output = token_loss_sum(output, batch.labels_BT)
    clock.lap()
    output.backward(None if last else torch.ones_like(output))
    return clock.laps()


def _halves(stage: nn.Module, batch: StageBatch, job: Job, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a backward's input half and of its weight half."""
    given = _activations(batch, job, device).requires_grad_()
    later = LaterGradients()
    fill_wide_gradients([stage])
    with weights_later(later):
        output = stage(given, **batch.stage_arguments())
        clock = _Clock(device)
        output.backward(torch.ones_like(output))
    clock.lap()
    later.compute()
    return clock.laps()


def _activations(batch: StageBatch, job: Job, device: torch.device) -> Tensor:
    """Returns random activations `[B, T, C]` in the compute dtype."""
    return torch.randn((*batch.tokens_BT.shape, job.model.hidden_size), dtype=compute_dtype(job), device=device)


class _Clock:
    """Measures two laps."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._times: list[float] = []
        self.lap()

    def lap(self) -> None:
        self._wait()
        self._times.append(time.perf_counter())

    def laps(self) -> tuple[float, float]:
        """Ends the second lap; returns the seconds of both laps."""
        self.lap()
        start, middle, end = self._times
        return middle - start, end - middle


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def answer(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Answers `{"job", "device"}`: see `open_meter` and `Meter.take`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    job, kind = parse_job(request["job"]), request.get("device") or "auto"
    torch.set_num_threads(max(1, int(job.resources.cpus_per_rank)))
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    with open_meter(job, kind) as meter:
        return meter.take()
