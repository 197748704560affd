"""A few training steps of a job on one rank, without store or control: what the numerics tests compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from raypp.data.loader import Loader, Microbatch, open_loader
from raypp.mesh.geometry import Mesh
from raypp.models.stage import parameter_names
from raypp.parallel.groups import make_groups
from raypp.records import Requests, Seat
from raypp.spec.load import parse_job
from raypp.train.build import build_stages
from raypp.train.optimizer import build_optimizer
from raypp.train.process_group import joined, pick_device
from raypp.train.reduce import GradientReducer
from raypp.train.step import StepRunner, Stopwatch


def seat_of(rank: int, world: int, port: int, job: Any, *, attempt: int = 1, device: str = "cpu") -> Seat:
    mesh = Mesh.of(job.mesh)
    assert mesh.world == world
    return Seat(
        run=job.name, attempt=attempt, rank=rank, world_size=world, coordinates=mesh.coordinates(rank),
        mesh_sizes=mesh.sizes, local_rank=rank, local_world_size=world, master_port=port, device=device,
        device_index=rank,
    )  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


class Unlabelled:
    """A loader with no label left in some microbatches of every step.

    Args:
        loader: The replica's loader.
        blank: Those microbatches, counted through all replicas.
        first: Number of the replica's first microbatch.
    """

    def __init__(self, loader: Loader, blank: tuple[int, ...], first: int) -> None:
        self.loader, self.blank, self.first = loader, blank, first

    def next_step(self) -> list[Microbatch]:
        step = self.loader.next_step()
        for index in range(len(step)):
            if self.first + index in self.blank:
                rows = (replace(row, labels=np.full_like(row.labels, -100)) for row in step[index].rows)
                step[index] = Microbatch(tuple(rows))
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def train_steps(
    rank: int,
    world: int,
    port: int,
    document: dict[str, Any],
    steps: int,
    device_type: str = "cpu",
    blank: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Trains and returns losses, norms, the scaled gradients of every step and the final weights, by global name.

    `blank` names microbatches, counted through all replicas, that have no label.
    """
    job = parse_job(document)
    seat = seat_of(rank, world, port, job, device=device_type)
    device = pick_device(seat)
    with joined(seat, 60):
        groups = make_groups(seat.mesh_sizes, device.type, job.mesh.ep)
        built = build_stages(job, groups, device, lambda action: None)
        optimizer = build_optimizer(built.modules, job.train.optimizer)
        reducer = GradientReducer(built.modules, parameter_names(job.model))
        place = groups.coordinates
        replica = place.dp_replicate * job.mesh.fsdp + place.fsdp
        own = open_loader(job, replica, job.mesh.replicas)
        loader: Any = Unlabelled(own, blank, replica * job.pipeline.microbatches) if blank else own
        runner = StepRunner(job, seat, groups, built, loader, optimizer, reducer, device)
        gradients: list[dict[str, torch.Tensor]] = []

        def keep(*_: Any) -> None:
            named = [(n, p) for module in built.modules for n, p in module.named_parameters()]
            gradients.append({name: whole(p.grad) for name, p in named})

        optimizer.register_step_pre_hook(keep)
        reports = []
        for step in range(1, steps + 1):
            watch = Stopwatch()
            reports.append(runner.run(step, runner.read(Requests(), watch), watch))
        weights = {name: whole(p) for module in built.modules for name, p in module.named_parameters()}
        loader.close()
    return {
        "loss": [r.loss for r in reports],
        "grad_norm": [r.grad_norm for r in reports],
        "tokens": [r.tokens for r in reports],
        "gradients": gradients,
        "weights": weights,
    }


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from those of all ranks: every rank has part of the names, and all must report the same sums."""
    first = results[0]
    for other in results[1:]:
        assert other["loss"] == first["loss"] and other["grad_norm"] == first["grad_norm"], (
            "ranks report different sums"
        )
    steps = len(first["gradients"])
    return {
        **first,
        "gradients": [{k: v for r in results for k, v in r["gradients"][i].items()} for i in range(steps)],
        "weights": {k: v for r in results for k, v in r["weights"].items()},
    }
