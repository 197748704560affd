"""Activation checkpointing changes no bit. Compiled blocks round differently, within a bound."""

from __future__ import annotations

import shutil
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from comparison import FIRST_STEP, assert_close, assert_identical, assert_tensors_close
from harness import run_ranks
from test_experts import BLANK
from test_experts import document as experts
from test_mesh_does_not_change_numbers import document
from training import Batch, merged, thinned, train_steps

from raypp.schedules.catalogue import SCHEDULES, schedule_named

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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_selective_recomputation_gives_the_same_bits(schedule: str) -> None:
    source = job({"activation_checkpointing": "selective"}, pp=2, schedule=schedule)
    assert_identical(merged(run_ranks(2, train_steps, source, STEPS)), one_process())


@pytest.mark.slow
def test_full_recomputation_gives_the_same_bits_when_the_backward_is_split() -> None:
    source = job({"activation_checkpointing": "full"}, pp=2, schedule="interleaved_zero_bubble")
    assert_identical(merged(run_ranks(2, train_steps, source, STEPS)), one_process())


@pytest.mark.slow
def test_selective_recomputation_gives_the_same_bits_around_a_ring() -> None:
    found = []
    for extent in ("none", "selective"):
        source = job({"activation_checkpointing": extent})
        source["mesh"] |= {"cp": 2, "cp_style": "ring"}
        found.append(merged(run_ranks(2, train_steps, source, STEPS)))
    assert_identical(*found)


EXTENTS = ("none", "selective", "full")
MATRIX = [(schedule, extent) for schedule in SCHEDULES.names() for extent in EXTENTS]


def compiled(extent: str, **settings: Any) -> dict[str, Any]:
    found = job({"compile": True, "activation_checkpointing": extent}, **settings)
    found["model"]["num_layers"] = 4
    return found


def on_two_ranks(schedule: str, extent: str) -> dict[str, Any]:
    stages = schedule_named(schedule).nearest_stages(1)
    return compiled(extent, pp=2, schedule=schedule, pipeline={"stages_per_rank": stages})


# A process compiles a block once, whatever the schedule: all jobs of a batch share that.
ALONE = Batch(1, {"eager": {**compiled("none"), "train": job()["train"]}} | {e: compiled(e) for e in EXTENTS}, 2)
PIPELINES = {case: on_two_ranks(*case) for case in MATRIX}
SHARDED = {("fsdp", extent): compiled(extent, fsdp=2) for extent in EXTENTS}
PAIRS = Batch(2, PIPELINES | SHARDED, 2)


@needs_compiler
@pytest.mark.parametrize("extent", thinned(EXTENTS, [], ["none"]))
def test_compiled_blocks_take_any_length_and_stay_close(extent: str) -> None:
    found, reference = ALONE[extent], ALONE["eager"]
    assert_close(found, reference, COMPILED)
    first = zip(found["gradients"][0].values(), reference["gradients"][0].values(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in first), "nothing was compiled"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", EXTENTS)
def test_recomputation_changes_no_bit_of_compiled_blocks(extent: str) -> None:
    assert_identical(ALONE[extent], ALONE["none"])


@needs_compiler
@pytest.mark.parametrize(("schedule", "extent"), thinned(MATRIX, [], [("1f1b", "none")]))
def test_a_compiled_pipeline_gives_the_bits_of_one_compiled_process(schedule: str, extent: str) -> None:
    assert_identical(PAIRS[schedule, extent], ALONE[extent])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", EXTENTS)
def test_compiled_sharded_blocks_add_up_what_one_compiled_process_does(extent: str) -> None:
    found, reference = PAIRS["fsdp", extent], ALONE[extent]
    assert found["loss"][0] == pytest.approx(reference["loss"][0], rel=FIRST_STEP, abs=0)
    assert_tensors_close(found["gradients"][0], reference["gradients"][0], FIRST_STEP)


def around(style: str, compiled: bool, extent: str) -> dict[str, Any]:
    small = {"model": {"num_layers": 1}, "pipeline": {"microbatches": 2}}
    train = {"compile": compiled, "activation_checkpointing": extent}
    return experts(mesh={"cp": 2, "cp_style": style, "ep": 2}, train=train, **small)


CASES = list(product(("ring", "ulysses"), (True, False), ("none", "selective")))
AROUND = Batch(2, {case: around(*case) for case in CASES}, 1, "cpu", BLANK)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", ["none", "selective"])
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_compiled_blocks_leave_experts_and_the_way_to_other_ranks_alone(style: str, extent: str) -> None:
    found, plain = AROUND[style, True, extent], AROUND[style, False, extent]
    assert_close(found, plain, COMPILED)
    assert not all(torch.equal(found["gradients"][0][name], value) for name, value in plain["gradients"][0].items()), (
        "nothing was compiled"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"cp": 2, "ep": 2}, {"fsdp": 2, "ep": 2}], ids=str)
def test_selective_recomputation_gives_the_same_bits_with_experts_over_ranks(mesh: dict[str, Any]) -> None:
    found = Batch(2, {e: experts(mesh=mesh, train={"activation_checkpointing": e}) for e in ("none", "selective")}, 1)
    assert_identical(found["selective"], found["none"])
