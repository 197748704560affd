"""Training on token shards gives the bits of training on their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparison import assert_identical
from training import Batch

from raypp.data.write_shards import Options, outputs_of, section_of_shards, write_shards
from raypp.spec.job import Job
from raypp.storage import open_store

pytestmark = pytest.mark.ranks

STEPS = 3
TEMPLATE = Path(__file__).parents[2] / "jobs/data/chatml.jinja"


def document(data: dict[str, Any], **mesh: int) -> dict[str, Any]:
    return {
        "name": "shards",
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
            "vocab_size": 260,
        },
        "data": {"seq_len": 96, **data},
        "mesh": mesh,
        "pipeline": {"microbatches": 4},
        "train": {"steps": STEPS, "micro_batch_size": 2, "optimizer": {"kind": "adamw", "lr": 3e-3}},
    }  # fmt: skip


def in_shards(data: dict[str, Any], out: Path) -> dict[str, Any]:
    """Tokenises data, and returns the section that trains on the shards."""
    job, urls = Job.model_validate(document(data)), {}
    for output in outputs_of(job):
        urls[output.key] = str(out / output.name)
        write_shards(output.read, output.request, open_store(urls[output.key]), Options(1, 4096))
    return section_of_shards(job, urls)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data")
    with (folder / "chats.jsonl").open("w") as file:
        for index in range(200):
            turns = [("user", "why? " * (index % 30)), ("assistant", "so. " * (1 + index % 7))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for index in range(100):
            file.write(json.dumps({"prompt": f"{index} and", "completion": " one" * (1 + index % 9)}) + "\n")
    chat = {"kind": "chat", "path": str(folder / "chats.jsonl"), "chat_template": str(TEMPLATE)}
    mixture = {
        "kind": "mixture",
        "chat_template": str(TEMPLATE),
        "parts": [
            {"kind": "chat", "path": str(folder / "chats.jsonl"), "weight": 2},
            {"kind": "chat", "path": str(folder / "pairs.jsonl"), "epochs": 1},
            {"kind": "synthetic", "num_documents": 40, "document_len": [3, 30]},
        ],
    }
    found = {"chat": chat, "mixture": mixture}
    return found | {f"{name} in shards": in_shards(data, folder / name) for name, data in found.items()}


@pytest.fixture(scope="module")
def two(jobs: dict[str, dict[str, Any]]) -> Batch:
    return Batch(2, {name: document(data, pp=2) for name, data in jobs.items()}, STEPS)


@pytest.mark.parametrize("name", [pytest.param("chat", marks=pytest.mark.slow), "mixture"])
def test_shards_train_as_their_source(two: Batch, name: str) -> None:
    assert_identical(two[f"{name} in shards"], two[name])
