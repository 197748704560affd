"""Tests token shards in a directory: the rows of the source, resumption, and damaged folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_jobs import as_lists, job, loading, rows_of

from raypp.data.shard_format import MANIFEST, PLAN, Manifest
from raypp.data.sources import data_identity, source_request
from raypp.data.token_blocks import BlockCache, Shard
from raypp.data.write_shards import Options, write_shards
from raypp.errors import DataError
from raypp.storage import ObjectStore, open_store

SHARD = 20_000


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "source.txt"
    path.write_text("\n\n".join(f"paragraph {i} " * (1 + i % 37) for i in range(1500)))
    return {"kind": "text", "path": str(path)}


def written(data: dict[str, Any], out: Path, **more: Any) -> Manifest:
    read, request = source_request(job(**data))
    return write_shards(read, request, open_store(str(out)), Options(1, SHARD, **more))


def rows(data: dict[str, Any]) -> list[Any]:
    with loading(job(**data, seq_len=64)) as loader:
        return as_lists(rows_of(loader.next_step() for _ in range(40)))


def test_the_rows_and_their_identity_are_those_of_the_source(text: dict[str, Any], tmp_path: Path) -> None:
    manifest = written(text, tmp_path / "out")
    assert len(manifest.shards) > 20 and manifest.documents == 1500
    shards = {"kind": "tokens", "path": str(tmp_path / "out")}
    assert data_identity(job(**shards)) == data_identity(job(**text))
    assert rows(shards) == rows(text)
    assert data_identity(job(**shards, eval={"fraction": 0.1})) == data_identity(job(**text, eval={"fraction": 0.1}))


def test_a_run_of_the_source_goes_on_with_its_shards(text: dict[str, Any], tmp_path: Path) -> None:
    written(text, tmp_path / "out")
    with loading(job(**text)) as first, loading(job(kind="tokens", path=str(tmp_path / "out"))) as second:
        first.next_step()
        second.seek(first.position())
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))


class Killed(Exception):
    """Stands for the end of the process."""


class FailingStore:
    """Stops at a write."""

    def __init__(self, store: ObjectStore, writes: int) -> None:
        self._store, self.left = store, writes

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
        self._store.put(key, data, if_absent=if_absent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4, 17, 61])
def test_it_goes_on_wherever_it_ended(text: dict[str, Any], tmp_path: Path, writes: int) -> None:
    whole = written(text, tmp_path / "whole")
    read, request = source_request(job(**text))
    store: Any = FailingStore(open_store(str(tmp_path / "out")), writes)
    with pytest.raises(Killed):
        write_shards(read, request, store, Options(1, SHARD))
    if writes:
        with pytest.raises(DataError, match=r"has no tokens\.json: the shards are not finished|no file"):
            data_identity(job(kind="tokens", path=str(tmp_path / "out")))
    kept: list[int] = []
    assert written(text, tmp_path / "out", found=kept.append) == whole
    assert kept == [max(0, (writes - 1) // 3)]
    files = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_file())
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert written(text, tmp_path / "out") == whole


def test_a_folder_of_other_data_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    written(text, tmp_path / "out")
    Path(text["path"]).write_text("changed")
    with pytest.raises(DataError, match="holds shards of other data"):
        written(text, tmp_path / "out")


def test_what_is_read_and_its_size_are_told(text: dict[str, Any], tmp_path: Path) -> None:
    total: list[int] = []
    read: list[int] = []
    written(text, tmp_path / "out", total=total.append, progress=read.append)
    assert total == [sum(read)] == [Path(text["path"]).stat().st_size]


@pytest.mark.parametrize("data", [{"kind": "synthetic"}, {"kind": "mixture", "parts": [{"kind": "synthetic"}]}])
def test_only_text_can_be_tokenised(data: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="has no text"):
        source_request(job(**data))


def test_damage_is_named(text: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    manifest = written(text, out)
    shards = {"kind": "tokens", "path": str(out)}

    def said(**more: Any) -> str:
        monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / f"cache-{len(list(tmp_path.iterdir()))}"))
        with pytest.raises(DataError) as caught:
            rows({**shards, **more})
        return str(caught.value)

    def changed(name: str, content: bytes) -> str:
        before = (out / name).read_bytes()
        (out / name).write_bytes(content)
        found = said()
        (out / name).write_bytes(before)
        return found

    ids, index = (out / "shard-000000.ids").read_bytes(), (out / "shard-000000.index").read_bytes()
    assert "is damaged (its CRC-32 differs)" in changed("shard-000000.ids", ids[:-2] + b"\1\1")
    assert "names shard-000000.ids, which has" in changed("shard-000000.ids", ids[:-2])
    assert "shard-000000.index is damaged" in changed("shard-000000.index", index[:-1] + b"\7")
    assert "shard-000000.index is damaged" in changed("shard-000000.index", index[:-1])
    document = json.loads((out / MANIFEST).read_text())
    assert "does not add up" in changed(MANIFEST, json.dumps({**document, "tokens": 3}).encode())
    for wrong in (b"{}", b"[]", b"\xff", json.dumps({**document, "shards": [{}]}).encode()):
        assert MANIFEST in changed(MANIFEST, wrong)
    other = {**document, "plan": {**document["plan"], "tokenizer": "abc"}}
    assert "written with another tokenizer (abc, not bytes)" in changed(MANIFEST, json.dumps(other).encode())
    (out / "more").mkdir()
    (out / "more" / "shard-000000.ids").write_bytes(b"1")
    assert "has shards in 2 folders" in said()
    (out / "more" / "shard-000000.ids").unlink()
    (out / "shard-000003.ids").unlink()
    assert "shard-000003.ids, which is missing" in said()
    assert (out / PLAN).exists() and manifest.plan.dtype == "uint16"


def test_an_id_that_the_model_lacks_is_named(text: dict[str, Any], tmp_path: Path) -> None:
    written(text, tmp_path / "out")
    small = job(kind="tokens", path=str(tmp_path / "out"), vocab_size=100)
    with pytest.raises(DataError, match="vocab_size"), loading(small) as loader:
        loader.next_step()


class CountingFile:
    """A file of numbers that counts reads."""

    name, place = "made", "data.path"

    def __init__(self, content: bytes) -> None:
        self._content, self.reads = content, 0

    def read(self, start: int, end: int) -> bytes:
        self.reads += 1
        return self._content[start:end]


def test_blocks_of_a_store_are_kept_on_disk_up_to_a_limit(tmp_path: Path) -> None:
    import zlib

    content = np.arange(64 * 16_384, dtype=np.uint32)  # 64 blocks
    raw = content.tobytes()
    sums = np.array([zlib.crc32(raw[at : at + 65536]) for at in range(0, len(raw), 65536)], dtype=np.uint32)
    file: Any = CountingFile(raw)

    def shard(most: int) -> Shard:
        return Shard(0, file, len(content), content.dtype, sums, 2**32, BlockCache(tmp_path / "blocks", most))

    first = shard(1 << 30)
    first.fetch([(0, 100_000), (200_000, 200_001)])
    reads = file.reads
    assert reads == 8
    assert (first[5:99_999] == content[5:99_999]).all() and (first[200_000:200_001] == 200_000).all()
    assert (shard(1 << 30)[0:10] == content[:10]).all() and file.reads == reads
    (tmp_path / "blocks" / "0-0").write_bytes(b"damaged")
    assert (shard(1 << 30)[0:10] == content[:10]).all() and file.reads == reads + 1
    small = shard(1 << 20)
    assert (small[:] == content).all() and len(small[7:7]) == 0
    assert sum(path.stat().st_size for path in (tmp_path / "blocks").iterdir()) <= 1 << 20
