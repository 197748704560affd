"""A loss computed in chunks of tokens is the same on every mesh, and near the one from logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from test_mesh_does_not_change_numbers import document
from training import Batch, InBothTypes, thinned, train_steps

from raypp.planning import loss_memory
from raypp.schedules.catalogue import SCHEDULES, schedule_named

pytestmark = pytest.mark.ranks

STEPS = 2
CHUNK = 32
"""Tokens; a microbatch has up to 128."""


def in_chunks(rank: int, world: int, port: int, job: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    """Trains with chunks small enough for this model."""
    loss_memory.CPU_BYTES = 4 * job["model"]["vocab_size"] * CHUNK
    return train_steps(rank, world, port, job, *arguments)


def tied(**settings: Any) -> dict[str, Any]:
    job = document(**settings)
    job["model"]["tie_embeddings"] = True
    return job


def replicated(schedule: str = "1f1b", **mesh: int) -> dict[str, Any]:
    stages = schedule_named(schedule).nearest_stages(2)
    job = document(pp=2, microbatches=8 // mesh.get("fsdp", 1), schedule=schedule, pipeline={"stages_per_rank": stages})
    job["mesh"] |= mesh
    return job


REFERENCES = {"fp32": document(), "bf16": document(train={"precision": "bf16"}), "tied": tied()}
ONE = Batch(1, REFERENCES, STEPS, train=in_chunks)
FROM_LOGITS = InBothTypes(1, {"": document()}, STEPS)
SUMS_OF_ONE = InBothTypes(1, {"": document()}, STEPS, train=in_chunks)
PIPELINES = Batch(
    2,
    {
        **{name: replicated(name) for name in SCHEDULES.names()},
        "bf16": document(pp=2, train={"precision": "bf16"}),
        "tied": tied(pp=2, schedule="zbv", pipeline={"stages_per_rank": 2}),
    },
    STEPS,
    train=in_chunks,
)
SPREAD = InBothTypes(
    4,
    {"1f1b, fsdp": replicated(fsdp=2), "zbv, fsdp": replicated("zbv", fsdp=2), "gpipe, cp": replicated("gpipe", cp=2)},
    STEPS,
    train=in_chunks,
)


@pytest.mark.parametrize("name", thinned([*SCHEDULES.names(), "bf16", "tied"], ["zbv", "tied"]))
def test_a_pipeline_gives_the_bits_of_one_process_in_chunks(name: str) -> None:
    assert_identical(PIPELINES[name], ONE[name if name in REFERENCES else "fp32"])


@pytest.mark.parametrize("name", thinned(SPREAD.jobs, [], ["zbv, fsdp", "gpipe, cp"]))
def test_meshes_that_share_tokens_add_up_what_one_process_does_in_chunks(name: str) -> None:
    assert_same_sums(SPREAD.numbers(name), SUMS_OF_ONE.numbers(""))


def test_chunks_add_up_what_whole_logits_do() -> None:
    found, reference = SUMS_OF_ONE.numbers(""), FROM_LOGITS.numbers("")
    assert_same_sums(found, reference)
    ours, theirs = (numbers.first["gradients"][0]["lm_head.weight"] for numbers in (found, reference))
    assert not torch.equal(ours, theirs), "the loss was not computed in chunks"
