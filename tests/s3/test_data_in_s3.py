"""Tests training data in S3 buckets, on a real server."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from datasets import Dataset, DatasetDict
from seaweed import BUCKET

from raypp.errors import DataError, UnreachableError
from raypp.job.job import Job
from raypp.rank.data.loader import open_loader
from raypp.rank.data.sources import check_data, open_documents, source_request
from raypp.rank.data.write_shards import Options, write_shards
from raypp.storage import open_store

pytestmark = pytest.mark.usefixtures("in_seaweed")


def documents(**data: Any) -> list[list[int]]:
    train = open_documents(Job.model_validate({"name": "s3", "data": data})).train
    return [train.ids(i).tolist() for i in range(len(train))]


def test_text_objects_below_a_prefix_are_read_in_order_of_key() -> None:
    store = open_store(f"s3://{BUCKET}/texts")
    store.put("b.txt", b"B")
    store.put("a.txt", b"A\n\nAA")
    store.put("other.bin", b"\xff")
    open_store(f"s3://{BUCKET}").put("texts-beside/c.txt", b"C")
    for path in (f"s3://{BUCKET}/texts", f"s3://{BUCKET}/texts/"):
        assert documents(kind="text", path=path) == [[65, 256], [65, 65, 256], [66, 256]]
    assert documents(kind="text", path=f"s3://{BUCKET}/texts/b.txt") == [[66, 256]]


@pytest.mark.gate
def test_compressed_objects_are_read_as_what_they_hold() -> None:
    store = open_store(f"s3://{BUCKET}/packed")
    store.put("a.txt.gz", gzip.compress(b"A\n\nAA"))
    store.put("b.txt.zst", zstandard.ZstdCompressor().compress(b"B"))
    assert documents(kind="text", path=f"s3://{BUCKET}/packed") == [[65, 256], [65, 65, 256], [66, 256]]
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    store.put("c.jsonl.zst", zstandard.ZstdCompressor().compress(json.dumps(row).encode()))
    template = str(Path(__file__).parents[2] / "jobs/data/chatml.jinja")
    (ids,) = documents(kind="chat", path=f"s3://{BUCKET}/packed", chat_template=template)
    assert bytes(ids).decode() == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


def test_a_token_object_is_fetched_once_to_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    np.save(sink, np.array([1, 2, 256, 3], dtype=np.uint16))
    open_store(f"s3://{BUCKET}/ids").put("a.npy", sink.getvalue())
    for _ in range(2):
        assert documents(kind="tokens", path=f"s3://{BUCKET}/ids") == [[1, 2, 256], [3]]
        monkeypatch.setattr("raypp.rank.data.source_files.SourceFile.chunks", None)


@pytest.mark.gate
def test_hugging_face_datasets_are_read_from_a_prefix(tmp_path: Path) -> None:
    """As `save_to_disk` writes them, and as they are on the hub, larger than one range."""
    many = [f"{number} " * 400 for number in range(3000)]
    splits = {"train": Dataset.from_dict({"text": many}), "test": Dataset.from_dict({"text": ["held", "out"]})}
    DatasetDict(splits).save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    for split, rows in splits.items():
        rows.to_parquet(tmp_path / "hub" / "en" / f"{split}-00000-of-00001.parquet", batch_size=500)
    pairs = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    pairs.to_parquet(tmp_path / "hub" / "pairs" / "train-00000-of-00001.parquet")
    store = open_store(f"s3://{BUCKET}/hf")
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        store.put(str(file.relative_to(tmp_path)), file.read_bytes())
    expected = [[*text.encode(), 256] for text in many]
    for path in (f"s3://{BUCKET}/hf/saved", f"s3://{BUCKET}/hf/saved/", f"s3://{BUCKET}/hf/saved/train"):
        assert documents(kind="hf", path=path) == expected
    hub = f"s3://{BUCKET}/hf/hub"
    assert documents(kind="hf", path=hub, config="en") == expected
    assert documents(kind="hf", path=hub, config="en", split="test") == [[*b"held", 256], [*b"out", 256]]
    assert documents(kind="hf", path=hub, config="pairs") == [[*b"ab", 256]]
    assert documents(kind="hf", path=f"{hub}/en/test-00000-of-00001.parquet") == [[*b"held", 256], [*b"out", 256]]
    with pytest.raises(DataError, match="several configurations"):
        documents(kind="hf", path=hub)
    damaged = f"s3://{BUCKET}/hf/damaged.parquet"
    store.put("damaged.parquet", (tmp_path / "hub/en/train-00000-of-00001.parquet").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"damaged\.parquet cannot be read as parquet"):
        documents(kind="hf", path=damaged)


@pytest.mark.gate
def test_what_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"^data\.path: no object at s3://.*/none"):
        documents(kind="text", path=f"s3://{BUCKET}/none")
    with pytest.raises(UnreachableError, match=r"data\.path: .*no-such-bucket"):
        documents(kind="text", path="s3://no-such-bucket/x")


@pytest.mark.gate
def test_parts_of_a_mixture_are_examined_where_they_are() -> None:
    open_store(f"s3://{BUCKET}/there").put("a.txt", b"A")
    parts = [{"kind": "text", "path": f"s3://{BUCKET}/{name}"} for name in ("there", "none")]
    mixed = {"kind": "mixture", "parts": [*parts, {"kind": "text", "path": "s3://no-such-bucket/x"}]}
    job = Job.model_validate({"name": "s3", "data": mixed})
    assert check_data(job) == []
    problems = check_data(job, stores=True)
    assert [problem.key for problem in problems] == ["data.parts[1].path", "data.parts[2].path"]
    assert "no object at" in problems[0].fault and "no-such-bucket" in problems[1].fault


@pytest.mark.gate
def test_a_refused_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UnreachableError, match=r"^data\.path: "):
        documents(kind="text", path=f"s3://{BUCKET}/texts")


_SHARDS = f"s3://{BUCKET}/shards"


def job(**data: Any) -> Job:
    return Job.model_validate({"name": "s3", "model": {"vocab_size": 320}, "data": data})


def rows(**data: Any) -> list[Any]:
    loader = open_loader(job(**data), 0, 1)
    steps = [loader.next_step() for _ in range(2)]
    loader.close()
    rows = [row for step in steps for microbatch in step for row in microbatch.rows]
    return [(row.tokens.tolist(), row.labels.tolist()) for row in rows]


@pytest.mark.gate
def test_a_run_reads_shards_by_ranges_and_keeps_only_what_it_read(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("\n\n".join(f"paragraph {number} " * (1 + number % 50) for number in range(20_000)))
    text = {"kind": "text", "path": str(source)}
    read, request = source_request(job(**text))
    store = open_store(_SHARDS)
    manifest = write_shards(read, request, store, Options(1, 4 << 20))
    store.delete(["tokens.json", *(f"shard-{n:06d}.{end}" for n in (2, 3) for end in ("ids", "index", "json"))])
    kept: list[int] = []
    assert write_shards(read, request, store, Options(1, 4 << 20, stored=kept.append)) == manifest
    assert kept == [2] and len(manifest.shards) > 3
    assert rows(kind="tokens", path=_SHARDS) == rows(**text)
    blocks = sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file())
    assert 0 < blocks < 2 * manifest.tokens


@pytest.mark.slow
def test_loss_masks_are_read_by_ranges_too(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    with source.open("w") as file:
        for number in range(20_000):
            pair = {"prompt": f"{number} and ", "completion": "so on " * (1 + number % 60)}
            file.write(json.dumps(pair) + "\n")
    data = {"kind": "chat", "path": str(source)}
    out = f"s3://{BUCKET}/masked"
    read, request = source_request(job(**data))
    manifest = write_shards(read, request, open_store(out), Options(1, 2 << 20))
    assert len(manifest.shards) > 3
    assert rows(kind="tokens", path=out) == rows(**data)
    names = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file()}
    assert "loss" in names and "0" in names
