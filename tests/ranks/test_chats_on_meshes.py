"""Conversations: neither the mesh nor tokenising beforehand changes the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from family_tokenizers import write_family
from training import document as small
from training import numbers, thinned, trained

from raypp.job.job import Job
from raypp.rank.data.write_shards import Options, outputs_of, section_of_shards, write_shards
from raypp.storage import open_store

MESHES: tuple[dict[str, int], ...] = ({"pp": 2}, {})
TEMPLATE = str(Path(__file__).parents[2] / "jobs/data/chatml.jinja")


def document(data: dict[str, Any], **mesh: int) -> dict[str, Any]:
    return small(microbatches=4, model={"vocab_size": 260}, data={"seq_len": 96, **data}, **mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with different shares of loss; of the longest, some pieces have none."""
    folder = tmp_path_factory.mktemp("chats")
    with (folder / "chats.jsonl").open("w") as file:
        for index in range(200):
            turns = [("user", "why? " * (index % 30)), ("assistant", "so. " * (1 + index % 7))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for index in range(100):
            file.write(json.dumps({"prompt": f"{index} and", "completion": " one" * (1 + index % 9)}) + "\n")
    return folder


@pytest.fixture(scope="module")
def chats(folder: Path) -> dict[str, Any]:
    return {"kind": "chat", "path": str(folder / "chats.jsonl"), "chat_template": TEMPLATE}


def test_a_pipeline_gives_the_bits_of_one_process(chats: dict[str, Any]) -> None:
    assert_identical(trained(document(chats, pp=2)), trained(document(chats)))


def test_a_pipeline_trains_rows_for_added_tokens_with_the_bits_of_one_process(tmp_path: Path) -> None:
    tokenizer = write_family("qwen", tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n}<call> Of the beginning.<|tool|>" * 3 for n in range(100)))
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "tokenizer": str(tokenizer), "seq_len": 64}
    added = {**data, "added_tokens": ["<|tool|>", {"text": "<call>", "special": False}]}
    pipeline, one = (trained(small(microbatches=4, model={"vocab_size": 405}, data=added, **mesh)) for mesh in MESHES)
    assert_identical(pipeline, one)
    rows = one["gradients"][0]["lm_head.weight"][[403, 404]]
    assert pipeline["weights"]["model.embed_tokens.weight"].shape[0] == 405 and rows.abs().sum(1).min() > 0
    seen = one["gradients"][0]["model.embed_tokens.weight"][[403, 404]]
    assert seen.abs().sum(1).min() > 0, "no row has an added token"


def test_the_mask_counts_fewer_tokens_and_gives_other_numbers(chats: dict[str, Any]) -> None:
    masked, every = trained(document(chats)), trained(document({**chats, "loss": "all"}))
    assert all(0 < few < all_ for few, all_ in zip(masked["tokens"], every["tokens"], strict=True))
    assert masked["loss"] != every["loss"]


@pytest.mark.parametrize("axis", thinned(["fsdp", "cp"], [], ["cp"]))
def test_shards_of_rows_and_of_sequences_give_the_same_sums(chats: dict[str, Any], axis: str) -> None:
    assert_same_sums(numbers(document(chats, **{axis: 2}), 2), numbers(document(chats), 2))


def in_shards(data: dict[str, Any], out: Path) -> dict[str, Any]:
    """Tokenises data, and returns the section that trains on the shards."""
    job, urls = Job.model_validate(document(data)), {}
    for output in outputs_of(job):
        urls[output.key] = str(out / output.name)
        write_shards(output.read, output.request, open_store(urls[output.key]), Options(1, 4096))
    return section_of_shards(job, urls)


@pytest.mark.parametrize("name", [pytest.param("chat", marks=pytest.mark.slow), "mixture"])
def test_shards_train_as_their_source(chats: dict[str, Any], folder: Path, tmp_path: Path, name: str) -> None:
    mixture = {
        "kind": "mixture",
        "chat_template": TEMPLATE,
        "parts": [
            {"kind": "chat", "path": str(folder / "chats.jsonl"), "weight": 2},
            {"kind": "chat", "path": str(folder / "pairs.jsonl"), "epochs": 1},
            {"kind": "synthetic", "num_documents": 40, "document_len": [3, 30]},
        ],
    }
    data = chats if name == "chat" else mixture
    assert_identical(trained(document(in_shards(data, tmp_path), pp=2)), trained(document(data, pp=2)))
