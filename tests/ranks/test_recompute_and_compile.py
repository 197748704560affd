"""Activation checkpointing changes no bit. Compiled blocks round differently, within a bound."""

import shutil
from typing import Any

import pytest
import torch
from comparison import FIRST_STEP, assert_close, assert_identical, assert_tensors_close
from test_experts import BLANK
from test_experts import document as experts
from training import document, thinned, train_afresh, train_steps, trained

from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named

# Inductor fuses norms, rotary encoding and SiLU, and sums in another order. Measured: 1.1e-5 on the
# worst gradient.
COMPILED = 1e-4
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on CPU needs a C++ compiler"
)


EXTENTS = ("none", "selective", "full")
MATRIX = [(schedule, extent) for schedule in SCHEDULES.names() for extent in EXTENTS]


def compiled(extent: str, how: Any = train_steps, **settings: Any) -> dict[str, Any]:
    """Trains two steps. A process compiles a block once, whatever the schedule."""
    train = {"compile": True, "activation_checkpointing": extent}
    return trained(document(microbatches=4, train=train, **settings), 2, train=how)


@needs_compiler
@pytest.mark.parametrize("extent", thinned(EXTENTS, [], ["none"]))
def test_compiled_blocks_take_any_length_and_stay_close(extent: str) -> None:
    found, reference = compiled(extent), trained(document(microbatches=4), 2)
    assert_close(found, reference, COMPILED)
    first = zip(found["gradients"][0].values(), reference["gradients"][0].values(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in first), "nothing was compiled"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", EXTENTS)
def test_recomputation_changes_no_bit_of_compiled_blocks(extent: str) -> None:
    assert_identical(compiled(extent), compiled("none"))


@needs_compiler
@pytest.mark.parametrize(("schedule", "extent"), thinned(MATRIX, [], [("1f1b", "none")]))
def test_a_compiled_pipeline_gives_the_bits_of_one_compiled_process(schedule: str, extent: str) -> None:
    stages = schedule_named(schedule).nearest_stages(1)
    found = compiled(extent, pp=2, schedule=schedule, pipeline={"stages_per_rank": stages})
    assert_identical(found, compiled(extent))


ADAPTERS = {"lora": {"rank": 4, "alpha": 8, "base": "nf4", "targets": ["all-linear"]}, "hidden_size": 64}
SHARED = {"shards": {"fsdp": 2}, "replicas": {"dp_replicate": 2}, "adapters": {"model": {**ADAPTERS, "ffn_size": 64}}}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("settings", SHARED.values(), ids=SHARED)
def test_split_backwards_of_compiled_blocks_are_those_of_whole_ones(settings: dict[str, Any]) -> None:
    split, whole = (
        compiled("none", train_afresh, pp=2, schedule=schedule, pipeline={"stages_per_rank": stages}, **settings)
        for schedule, stages in (("zbv", 2), ("1f1b", 1))
    )
    assert_identical(split, whole)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", EXTENTS)
def test_compiled_sharded_blocks_add_up_what_one_compiled_process_does(extent: str) -> None:
    found, reference = compiled(extent, fsdp=2), compiled(extent)
    assert found["loss"][0] == pytest.approx(reference["loss"][0], rel=FIRST_STEP, abs=0)
    assert_tensors_close(found["gradients"][0], reference["gradients"][0], FIRST_STEP)


def around(extent: str, compiled: bool, **mesh: Any) -> dict[str, Any]:
    train = {"compile": compiled, "activation_checkpointing": extent}
    job = experts(mesh={"ep": 2, **mesh}, train=train, model={"num_layers": 1}, pipeline={"microbatches": 2})
    return trained(job, 1, blank=BLANK)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", ["none", "selective"])
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_compiled_blocks_leave_experts_and_the_way_to_other_ranks_alone(style: str, extent: str) -> None:
    found, plain = (around(extent, compiled, cp=2, cp_style=style) for compiled in (True, False))
    assert_close(found, plain, COMPILED)
    assert not all(torch.equal(found["gradients"][0][name], value) for name, value in plain["gradients"][0].items()), (
        "nothing was compiled"
    )
