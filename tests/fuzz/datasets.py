"""Hugging Face datasets and token shards."""

import io
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.fuzz import target

sys.path.append(str(Path(__file__).parents[1] / "unit" / "hostile"))

from file_cases import job, use_data

from raypp.rank.data.sources import open_documents, source_request
from raypp.rank.data.write_shards import Options, write_shards
from raypp.storage import open_store

_TEMPLATE = str(Path(__file__).parents[2] / "jobs/data/chatml.jinja")
_TEXT = {"text": ["one", "two", None, ""], "more": [1, 2, 3, 4]}
_TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_CHAT = {"messages": [_TURNS, _TURNS], "tools": [None, '[{"name": "f"}]']}
_PAIRS = b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "de"}\n' * 40


def _parquet(columns: dict[str, Any], compression: str, dictionary: bool) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression=compression, use_dictionary=dictionary, row_group_size=2)
    return sink.getvalue()


def _arrow(columns: dict[str, Any], new: str, dictionary: bool = False) -> bytes:
    import pyarrow as pa

    sink, table = io.BytesIO(), pa.table(columns)
    if dictionary:
        table = table.set_column(0, "text", table["text"].dictionary_encode())
    with getattr(pa.ipc, new)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


@target(
    partial(_parquet, _TEXT, "none", False), partial(_parquet, _TEXT, "snappy", True),
    partial(_parquet, _TEXT, "zstd", True), partial(_parquet, _CHAT, "gzip", False),
)  # fmt: skip
def parquet(data: bytes) -> None:
    _hf("a.parquet", data)


@target(
    partial(_arrow, _TEXT, "new_stream"), partial(_arrow, _TEXT, "new_file"),
    partial(_arrow, _TEXT, "new_stream", True), partial(_arrow, _CHAT, "new_stream"),
)  # fmt: skip
def arrow(data: bytes) -> None:
    _hf("a.arrow", data)


def _hf(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYPP_CACHE_DIR"] = f"{folder}/cache"
        (Path(folder) / name).write_bytes(data)
        template = _TEMPLATE if b"messages" in data else None  # with texts it would be refused
        use_data("hf", f"{folder}/{name}", chat_template=template)


def _shards(folder: str) -> None:
    """Writes shards with loss masks to `folder/out`, or goes on with those that are there."""
    source = Path(folder) / "a.jsonl"
    source.write_bytes(_PAIRS)
    os.utime(source, (1, 1))
    read, request = source_request(job(kind="chat", path=str(source)))
    write_shards(read, request, open_store(f"{folder}/out"), Options(1, 300))


@cache
def _objects() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _shards(folder)
        return {path.name: path.read_bytes() for path in (Path(folder) / "out").iterdir() if path.is_file()}


def _object(name: str) -> Callable[[], bytes]:
    return lambda: _objects()[name]


def _read_with(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYPP_CACHE_DIR"] = f"{folder}/cache"
        for other, content in {**_objects(), name: data}.items():
            (Path(folder) / other).write_bytes(content)
        train = open_documents(job(kind="tokens", path=folder)).train
        for index in range(len(train)):
            train.ids(index)
            train.carries_loss(index)


_OBJECTS = {"manifest": "tokens.json"} | {part: f"shard-000000.{part}" for part in ("index", "ids", "loss")}
for _name, _key in _OBJECTS.items():
    target(_object(_key), name=f"shard_{_name}")(lambda data, key=_key: _read_with(key, data))


@target(_object("shard-000000.json"))
def shard_record(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _shards(folder)
        (Path(folder) / "out" / "tokens.json").unlink()
        (Path(folder) / "out" / "shard-000000.json").write_bytes(data)
        _shards(folder)
