"""Tests training data in S3 buckets, on a real server."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from seaweed import BUCKET, seaweed

from raypp.clusters.seaweed import SeaweedServer
from raypp.data.sources import open_documents
from raypp.errors import DataError, UnreachableError
from raypp.spec.job import Job
from raypp.storage import open_store

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    with seaweed() as running:
        yield running


@pytest.fixture(autouse=True)
def here(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path))


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
        monkeypatch.setattr("raypp.data.source_files.SourceFile.chunks", None)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"^data\.path: no object at s3://.*/none"):
        documents(kind="text", path=f"s3://{BUCKET}/none")
    with pytest.raises(UnreachableError, match=r"data\.path: .*no-such-bucket"):
        documents(kind="text", path="s3://no-such-bucket/x")


def test_a_refused_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UnreachableError, match=r"^data\.path: "):
        documents(kind="text", path=f"s3://{BUCKET}/texts")
