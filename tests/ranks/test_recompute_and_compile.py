"""Activation checkpointing changes no bit. Compiled blocks round differently, within a bound."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch
from comparison import assert_close, assert_identical
from harness import run_ranks
from test_experts import document as experts
from test_experts import trained as with_experts
from test_mesh_does_not_change_numbers import document
from training import merged, train_steps

pytestmark = pytest.mark.ranks
STEPS = 3
# Inductor fuses norms, rotary encoding and SiLU, and sums in another order. Measured: 1.1e-5 on the
# worst gradient.
COMPILED = 1e-4
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on CPU needs a C++ compiler"
)


def job(train: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    found = document(microbatches=4 // settings.get("fsdp", 1), train=train or {}, **settings)
    found["model"]["num_layers"] = 2
    return found


@cache
def one_process() -> dict[str, Any]:
    return merged(run_ranks(1, train_steps, job(), STEPS))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_selective_recomputation_gives_the_same_bits(schedule: str) -> None:
    source = job({"activation_checkpointing": "selective"}, pp=2, schedule=schedule)
    assert_identical(merged(run_ranks(2, train_steps, source, STEPS)), one_process())


def test_full_recomputation_gives_the_same_bits_when_the_backward_is_split() -> None:
    source = job({"activation_checkpointing": "full"}, pp=2, schedule="interleaved_zero_bubble")
    assert_identical(merged(run_ranks(2, train_steps, source, STEPS)), one_process())


def test_selective_recomputation_gives_the_same_bits_around_a_ring() -> None:
    found = []
    for extent in ("none", "selective"):
        source = job({"activation_checkpointing": extent})
        source["mesh"] |= {"cp": 2, "cp_style": "ring"}
        found.append(merged(run_ranks(2, train_steps, source, STEPS)))
    assert_identical(*found)


@needs_compiler
def test_compiled_blocks_take_any_length_and_stay_close() -> None:
    source = job({"compile": True, "activation_checkpointing": "full"})
    found, reference = merged(run_ranks(1, train_steps, source, STEPS)), one_process()
    assert_close(found, reference, COMPILED)
    first = zip(found["gradients"][0].values(), reference["gradients"][0].values(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in first), "nothing was compiled"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_compiled_blocks_leave_experts_and_the_way_to_other_ranks_alone(style: str) -> None:
    small = {"model": {"num_layers": 1}, "pipeline": {"microbatches": 2}}
    mesh = {"cp": 2, "cp_style": style, "ep": 2}
    found = with_experts(experts(mesh=mesh, train={"compile": True}, **small), 1)
    plain = with_experts(experts(mesh=mesh, **small), 1)
    assert_close(found, plain, COMPILED)
    assert not all(torch.equal(found["gradients"][0][name], value) for name, value in plain["gradients"][0].items()), (
        "nothing was compiled"
    )
