"""Trains a few steps of a job on one rank, without store or controller, to compare numbers."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import run_in_living

from raypp.job.load import parse_job
from raypp.rank.data.loader import Loader, Microbatch
from raypp.rank.own_seat import local_seat as seat_of
from raypp.rank.step.step import StepRunner
from raypp.state.hf.initial_weights import load_from_hf
from raypp.tools.parity import train_some_steps, whole

__all__ = ["Changed", "Numbers", "document", "merged", "numbers", "on_ranks", "seat_of", "thinned", "train_steps",
           "trained", "whole", "without_labels"]  # fmt: skip
STEPS = 3
MESH = ("pp", "fsdp", "dp_replicate", "cp", "cp_style", "tp", "ep", "reshard_after_forward", "reduce_gradients")


def document(*, layers: int = 4, microbatches: int = 8, schedule: str = "1f1b", **sections: Any) -> dict[str, Any]:
    """Returns a small job whose gradients are clipped.

    Args:
        sections: Keys of `mesh`, and sections: `model`, `pipeline` and `train` are laid over those
            of the job.
    """
    mesh = {key: sections.pop(key) for key in MESH if key in sections}
    replicas = mesh.get("fsdp", 1) * mesh.get("dp_replicate", 1)
    return {
        "name": "numbers",
        "model": {
            "kind": "llama", "num_layers": layers, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
            "vocab_size": 96, **sections.pop("model", {}),
        },
        "data": {"kind": "synthetic", "num_documents": 400, "document_len": [3, 50], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {
            "schedule": schedule, "microbatches": microbatches // replicas, "pad_to_multiple_of": 8,
            **sections.pop("pipeline", {}),
        },
        "train": {
            "steps": STEPS, "micro_batch_size": 2, "seed": 3, "clip_norm": 0.05,
            "optimizer": {"kind": "adamw", "lr": 3e-3}, "lr_schedule": {"kind": "cosine", "warmup_steps": 1},
            **sections.pop("train", {}),
        },
        **sections,
    }  # fmt: skip


class Changed:
    def __init__(self, loader: Loader, change: Callable[[list[Microbatch]], list[Microbatch]]) -> None:
        self.loader, self.change = loader, change

    def next_step(self) -> list[Microbatch]:
        return self.change(self.loader.next_step())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def without_labels(microbatch: Microbatch) -> Microbatch:
    return Microbatch(tuple(replace(row, labels=np.full_like(row.labels, -100)) for row in microbatch.rows))


def train_steps(
    rank: int,
    world: int,
    port: int,
    document: dict[str, Any],
    steps: int,
    device_type: str = "cpu",
    blank: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    **watch: Any,
) -> dict[str, Any]:
    """Returns losses, norms, scaled gradients of each step, final weights, by global name."""
    # Comparisons with the CPU need products in fp32.
    job = parse_job({**document, "train": {"tf32": False, **document.get("train", {})}})
    seat = seat_of(rank, world, port, job, device=device_type)
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def wrapped(loader: Loader, replica: int) -> Any:
        first = replica * job.pipeline.microbatches
        return Changed(
            loader, lambda step: [without_labels(m) if at in blank else m for at, m in enumerate(step, first)]
        )

    with default_dtype(dtype):
        reports = train_some_steps(job, seat, steps, kept.__setitem__, wrap=wrapped, **watch)
    weights = kept.pop("weights")
    return {
        "loss": [r.loss for r in reports], "grad_norm": [r.grad_norm for r in reports],
        "tokens": [r.tokens for r in reports], "extras": [r.extras for r in reports],
        "flops": [r.flops for r in reports], "wire_bytes": [r.wire_bytes for r in reports],
        "replica_bytes": [r.replica_bytes for r in reports],
        "parts": [set(r.parts_s) for r in reports], "gradients": list(kept.values()), "weights": weights,
    }  # fmt: skip


def train_afresh(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Like `train_steps`, without what the process compiled before, for other models: torch has a
    limit, beyond which it computes without compiling."""
    torch.compiler.reset()
    return train_steps(*arguments, **options)


def train_from_files(rank: int, world: int, port: int, document: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Like `train_steps`, with the weights of `model.from_hf`: drawn gains and biases are alike."""

    def load(step: int, runner: StepRunner) -> None:
        model = document["model"]
        if step == 1:
            load_from_hf(model["from_hf"], runner.built.modules, frozen="lora" in model)

    return train_steps(rank, world, port, document, *how, before=load)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the ranks' results: names are disjoint, and all must report the same sums."""
    first = results[0]
    for other in results[1:]:
        same = all(other[key] == first[key] for key in ("loss", "grad_norm", "extras", "flops"))
        assert same, "ranks report different sums"
    steps = len(first["gradients"])
    return {
        **first,
        "gradients": [{k: v for r in results for k, v in r["gradients"][i].items()} for i in range(steps)],
        "weights": {k: v for r in results for k, v in r["weights"].items()},
    }


def thinned(cases: Iterable[Any], quick: Collection[Any], gate: Collection[Any] = ()) -> list[Any]:
    """Returns the cases of a parametrised test. All but those of `quick` are slow tests, of which
    `.ci/run` runs those of `gate`. `test_pairs_of_features.py` trains each pair of features. A
    quick case shows what that does not."""
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


def on_ranks(
    job: dict[str, Any],
    steps: int = STEPS,
    *,
    blank: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    train: Callable[..., dict[str, Any]] = train_steps,
) -> list[dict[str, Any]]:
    """Trains a job when its result is first requested; returns what each rank found. Jobs of one
    mesh run in the same processes, one after another. Other meshes have separate ones: for the life
    of a process, torch's DTensor remembers the names of the groups through which it moved a
    tensor's shards, and a mesh of another shape has other names."""
    case = job, steps, "cpu", blank, dtype
    key = json.dumps([train.__module__, train.__qualname__, case], default=str)
    if key not in _found:
        world = parse_job(job).mesh.world
        _found[key] = run_in_living(world, (train, json.dumps(job.get("mesh"))), train, *case)
    return _found[key]


def trained(job: dict[str, Any], steps: int = STEPS, **how: Any) -> dict[str, Any]:
    return merged(on_ranks(job, steps, **how))


class Numbers(NamedTuple):
    """Input of `comparison.assert_same_sums`: all steps in fp64, and the first in fp32."""

    wide: dict[str, Any]
    first: dict[str, Any]


def numbers(job: dict[str, Any], steps: int = STEPS, **how: Any) -> Numbers:
    """Like `trained`, in fp64 and, for one step, in fp32."""
    return Numbers(trained(job, steps, dtype=torch.float64, **how), trained(job, 1, **how))
