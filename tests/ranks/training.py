"""Trains a few steps of a job on one rank, without store or controller, to compare numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import run_in_living

from raypp.data.loader import Loader, Microbatch
from raypp.measure.parity import train_some_steps, whole
from raypp.spec.load import parse_job
from raypp.train.own_seat import local_seat as seat_of

__all__ = ["Batch", "InBothTypes", "Numbers", "merged", "seat_of", "thinned", "train_steps", "whole"]


class Unlabelled:
    """A loader that removes all labels from some microbatches of every step.

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
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Trains and returns losses, norms, the scaled gradients of every step and the final weights,
    by global name.

    Args:
        rank: This rank.
        world: Number of ranks.
        port: Port of the rendezvous.
        document: The job.
        steps: Number of steps.
        device_type: Device of the computation.
        blank: Microbatches, counted through all replicas, that have no label.
        dtype: Type of the computation where the job says fp32.
    """
    # Comparisons with the CPU need products in fp32.
    job = parse_job({**document, "train": {"tf32": False, **document.get("train", {})}})
    seat = seat_of(rank, world, port, job, device=device_type)
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def wrapped(loader: Loader, replica: int) -> Any:
        return Unlabelled(loader, blank, replica * job.pipeline.microbatches) if blank else loader

    with default_dtype(dtype):
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the ranks' results. Each rank has some of the names, and all must report the same
    sums."""
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


def thinned(cases: Iterable[Any], quick: Collection[Any], gate: Collection[Any] = ()) -> list[Any]:
    """Returns the cases of a parametrised test. All but those of `quick` are slow tests, of which
    `.ci/run` runs those of `gate`.

    `test_pairs_of_features.py` trains each pair of features. A quick case shows what that does not.
    """
    cases = list(cases)
    unknown = [case for case in (*quick, *gate) if case not in cases]
    assert not unknown, unknown
    slow, also = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.gate)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else also if case in gate else slow,
        )
        for case in cases
    ]


_found: dict[str, list[dict[str, Any]]] = {}
"""What each rank found, by the job and everything else that decides it: files share references."""


class Batch:
    """Jobs that are trained when their result is first requested.

    Jobs of one mesh run in the same processes, one after another. Other meshes have separate ones:
    for the life of a process, torch's DTensor remembers the names of the groups through which it
    moved a tensor's shards, and a mesh of another shape has other names.

    Args:
        world: Ranks of every job.
        jobs: Jobs by name.
        steps: Steps of every job.
        device_type: Device of the computation.
        blank: As for `train_steps`.
        train: Takes the arguments of `train_steps` and returns what it returns.
    """

    def __init__(
        self,
        world: int,
        jobs: Mapping[Any, dict[str, Any]],
        steps: int,
        device_type: str = "cpu",
        blank: tuple[int, ...] = (),
        train: Callable[..., dict[str, Any]] = train_steps,
    ) -> None:
        self.jobs = jobs
        self._world, self._steps, self._device_type, self._blank, self._train = world, steps, device_type, blank, train

    def _case(self, name: Any) -> tuple[Any, ...]:
        """Returns the arguments of `train_steps`."""
        return self.jobs[name], self._steps, self._device_type, self._blank

    def ranks(self, name: Any) -> list[dict[str, Any]]:
        """Returns what each rank found."""
        case = self._case(name)
        alike = self._train, json.dumps(case[0]["mesh"])
        key = json.dumps([self._train.__module__, self._train.__qualname__, self._world, case], default=str)
        if key not in _found:
            _found[key] = run_in_living(self._world, alike, self._train, *case)
        return _found[key]

    def __getitem__(self, name: Any) -> dict[str, Any]:
        """Returns the merged result of a job."""
        return merged(self.ranks(name))


class Numbers(NamedTuple):
    """Input of `comparison.assert_same_sums`: all steps in fp64, and the first in fp32."""

    wide: dict[str, Any]
    first: dict[str, Any]


class InBothTypes(Batch):
    """Jobs that are trained in fp64 and, for one step, in fp32. `ranks` takes `(name, dtype)`."""

    def _case(self, name: Any) -> tuple[Any, ...]:
        job, dtype = name
        steps = {torch.float64: self._steps, torch.float32: 1}[dtype]
        return self.jobs[job], steps, self._device_type, self._blank, dtype

    def numbers(self, name: Any) -> Numbers:
        return Numbers(self[name, torch.float64], self[name, torch.float32])
