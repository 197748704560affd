"""Loss on the assistant's turns only: the mesh does not change the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from training import Batch, InBothTypes, thinned

pytestmark = pytest.mark.ranks

STEPS = 2
TEMPLATE = Path(__file__).parents[2] / "jobs/data/chatml.jinja"


def document(folder: Path, *, microbatches: int = 4, loss: str = "assistant", **mesh: int) -> dict[str, Any]:
    return {
        "name": "masked",
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
            "vocab_size": 260,
        },
        "data": {
            "kind": "chat", "path": str(folder / "chats.jsonl"), "chat_template": str(TEMPLATE), "seq_len": 96,
            "loss": loss,
        },
        "mesh": mesh,
        "pipeline": {"microbatches": microbatches},
        "train": {
            "steps": STEPS, "micro_batch_size": 2, "clip_norm": 0.05, "optimizer": {"kind": "adamw", "lr": 3e-3},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with different shares of loss; of the longest, some pieces have none."""
    path = tmp_path_factory.mktemp("chats")
    with (path / "chats.jsonl").open("w") as file:
        for index in range(60):
            turns = [("user", "why? " * (index % 30)), ("assistant", "so. " * (1 + index % 7))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Batch:
    return Batch(2, {"pp": document(folder, pp=2)}, STEPS)


@pytest.fixture(scope="module")
def one(folder: Path) -> Batch:
    return Batch(1, {"": document(folder), "all": document(folder, loss="all")}, STEPS)


def test_a_pipeline_gives_the_bits_of_one_process(one: Batch, two: Batch) -> None:
    assert_identical(two["pp"], one[""])


def test_the_mask_counts_fewer_tokens_and_gives_other_numbers(one: Batch) -> None:
    assert all(0 < masked < every for masked, every in zip(one[""]["tokens"], one["all"]["tokens"], strict=True))
    assert one[""]["loss"] != one["all"]["loss"]


MESHES: list[dict[str, int]] = [{"fsdp": 2, "microbatches": 2}, {"cp": 2}]


@pytest.mark.parametrize("mesh", thinned(MESHES, [], MESHES[1:]), ids=["fsdp", "cp"])
def test_shards_of_rows_and_of_sequences_give_the_same_sums(folder: Path, mesh: dict[str, int]) -> None:
    sums = InBothTypes(1, {"": document(folder)}, STEPS)
    other = InBothTypes(2, {"": document(folder, **mesh)}, STEPS)
    assert_same_sums(other.numbers(""), sums.numbers(""))
