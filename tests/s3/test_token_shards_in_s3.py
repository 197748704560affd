"""Tests token shards in S3, on a real server: written, gone on with, and read by ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from seaweed import BUCKET

from raypp.data.loader import open_loader
from raypp.data.sources import source_request
from raypp.data.write_shards import Options, write_shards
from raypp.spec.job import Job
from raypp.storage import open_store

pytestmark = pytest.mark.usefixtures("in_seaweed")
OUT = f"s3://{BUCKET}/shards"


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
    store = open_store(OUT)
    manifest = write_shards(read, request, store, Options(1, 4 << 20))
    store.delete(["tokens.json", *(f"shard-{n:06d}.{end}" for n in (2, 3) for end in ("ids", "index", "json"))])
    kept: list[int] = []
    assert write_shards(read, request, store, Options(1, 4 << 20, stored=kept.append)) == manifest
    assert kept == [2] and len(manifest.shards) > 3
    assert rows(kind="tokens", path=OUT) == rows(**text)
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
