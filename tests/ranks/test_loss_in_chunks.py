"""A loss computed in chunks of tokens is the same on every mesh, and near the one from logits."""

from typing import Any

import pytest
import torch
from comparison import assert_identical, assert_same_sums
from training import document, numbers, thinned, train_steps, trained

from raypp.planning import loss_memory
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named

STEPS = 2
CHUNK = 32
"""Tokens; a microbatch has up to 128."""


def in_chunks(rank: int, world: int, port: int, job: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    loss_memory.CPU_BYTES = 4 * job["model"]["vocab_size"] * CHUNK
    return train_steps(rank, world, port, job, *arguments)


TIED = {"model": {"tie_embeddings": True}}
BF16 = {"train": {"precision": "bf16"}}


def pipelined(schedule: str = "1f1b", **settings: Any) -> dict[str, Any]:
    stages = schedule_named(schedule).nearest_stages(2)
    return document(pp=2, schedule=schedule, pipeline={"stages_per_rank": stages}, **settings)


PIPELINES = {
    **{name: (pipelined(name), document()) for name in SCHEDULES.names()},
    "bf16": (pipelined(**BF16), document(**BF16)),
    "tied": (pipelined("zbv", **TIED), document(**TIED)),
}
SPREAD = {
    "1f1b, fsdp": pipelined(fsdp=2), "zbv, fsdp": pipelined("zbv", fsdp=2), "gpipe, cp": pipelined("gpipe", cp=2)
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(PIPELINES, ["zbv", "tied"]))
def test_a_pipeline_gives_the_bits_of_one_process_in_chunks(name: str) -> None:
    assert_identical(*(trained(job, STEPS, train=in_chunks) for job in PIPELINES[name]))


@pytest.mark.parametrize("name", thinned(SPREAD, [], ["zbv, fsdp"]))
def test_meshes_that_share_tokens_add_up_what_one_process_does_in_chunks(name: str) -> None:
    assert_same_sums(*(numbers(job, STEPS, train=in_chunks) for job in (SPREAD[name], document())))


def test_chunks_add_up_what_whole_logits_do() -> None:
    found, reference = numbers(document(), STEPS, train=in_chunks), numbers(document(), STEPS)
    assert_same_sums(found, reference)
    ours, theirs = (one.first["gradients"][0]["lm_head.weight"] for one in (found, reference))
    assert not torch.equal(ours, theirs), "the loss was not computed in chunks"
