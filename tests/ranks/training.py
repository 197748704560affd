"""A few training steps of a job on one rank, without store or control: what the numerics tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from harness import run_in_turn

from raypp.data.loader import Loader, Microbatch
from raypp.measure.parity import train_some_steps, whole
from raypp.spec.load import parse_job
from raypp.train.seats import local_seat as seat_of

__all__ = ["Batch", "merged", "seat_of", "train_steps", "whole"]


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
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def wrapped(loader: Loader, replica: int) -> Any:
        return Unlabelled(loader, blank, replica * job.pipeline.microbatches) if blank else loader

    reports = train_some_steps(job, seat, steps, kept.__setitem__, wrap=wrapped)
    weights = kept.pop("weights")
    return {
        "loss": [r.loss for r in reports],
        "grad_norm": [r.grad_norm for r in reports],
        "tokens": [r.tokens for r in reports],
        "extras": [r.extras for r in reports],
        "gradients": list(kept.values()),
        "weights": weights,
    }


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from those of all ranks: every rank has part of the names, and all must report the same sums."""
    first = results[0]
    for other in results[1:]:
        same = all(other[key] == first[key] for key in ("loss", "grad_norm", "extras"))
        assert same, "ranks report different sums"
    steps = len(first["gradients"])
    return {
        **first,
        "gradients": [{k: v for r in results for k, v in r["gradients"][i].items()} for i in range(steps)],
        "weights": {k: v for r in results for k, v in r["weights"].items()},
    }


class Batch:
    """Jobs that are trained by the same processes, one after another: starting four costs as much as a small job.

    Args:
        world: Ranks of every job.
        jobs: By name; the first that is asked for runs them all.
        rest: Further arguments of `train_steps`: steps, device type, blank microbatches.
    """

    def __init__(self, world: int, jobs: Mapping[Any, dict[str, Any]], *rest: Any) -> None:
        self._world, self._jobs, self._rest = world, jobs, rest
        self._results: dict[Any, list[dict[str, Any]]] = {}

    def ranks(self, name: Any) -> list[dict[str, Any]]:
        """What each rank found."""
        if not self._results:
            cases = [(job, *self._rest) for job in self._jobs.values()]
            self._results = dict(zip(self._jobs, run_in_turn(self._world, train_steps, cases), strict=True))
        return self._results[name]

    def __getitem__(self, name: Any) -> dict[str, Any]:
        """The merged result of a job."""
        return merged(self.ranks(name))
