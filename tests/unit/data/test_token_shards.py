"""Tests token shards in a directory: the rows of the source, resumption, and damaged folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_jobs import as_lists, data_identity, job, loading, rows_of, texts_of

from raypp.errors import DataError
from raypp.rank.data.look import look_at
from raypp.rank.data.shard_format import MANIFEST, PLAN, Manifest
from raypp.rank.data.sources import open_documents, source_request
from raypp.rank.data.tokens import BlockCache, Shard
from raypp.rank.data.write_shards import Options, outputs_of, section_of_shards, write_shards
from raypp.storage import ObjectStore, open_store

SHARD = 20_000


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "source.txt"
    path.write_text("\n\n".join(f"paragraph {i} " * (1 + i % 37) for i in range(1500)))
    return {"kind": "text", "path": str(path)}


@pytest.fixture
def chat(tmp_path: Path) -> dict[str, Any]:
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with path.open("w") as file:
        for i in range(800):
            turns = [("user", f"question {i} " * (i % 13)), ("assistant", f"answer {i} " * (1 + i % 7))]
            messages = [{"role": role, "content": content} for role, content in turns]
            row = {"messages": messages} if i % 3 else {"prompt": "p", "completion": f"c{i}"}
            file.write(json.dumps(row) + "\n")
    return {"kind": "chat", "path": str(path), "chat_template": str(template)}


def written(data: dict[str, Any], out: Path, **more: Any) -> Manifest:
    read, request = source_request(job(**data))
    return write_shards(read, request, open_store(str(out)), Options(1, SHARD, **more))


def rows(data: dict[str, Any]) -> list[Any]:
    with loading(job(**data, seq_len=64)) as loader:
        return as_lists(rows_of(loader.next_step() for _ in range(40)))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_rows_and_their_identity_are_those_of_the_source(kind: str, request: Any, tmp_path: Path) -> None:
    text = request.getfixturevalue(kind)
    manifest = written(text, tmp_path / "out")
    assert len(manifest.shards) > 5 and manifest.documents in (800, 1500)
    shards = {"kind": "tokens", "path": str(tmp_path / "out")}
    assert data_identity(job(**shards)) == data_identity(job(**text))
    assert rows(shards) == rows(text)
    assert data_identity(job(**shards, eval={"fraction": 0.1})) == data_identity(job(**text, eval={"fraction": 0.1}))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_run_of_the_source_goes_on_with_its_shards(kind: str, request: Any, tmp_path: Path) -> None:
    data = request.getfixturevalue(kind)
    written(data, tmp_path / "out")
    with loading(job(**data)) as first, loading(job(kind="tokens", path=str(tmp_path / "out"))) as second:
        first.next_step()
        second.seek(first.position())
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))


class Killed(Exception):
    """Stands for the end of the process."""


class FailingStore:
    def __init__(self, store: ObjectStore, writes: int) -> None:
        self._store, self.left = store, writes

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
        self._store.put(key, data, if_absent=if_absent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(("kind", "writes"), [*(("text", n) for n in (0, 2, 3, 4, 61)), ("chat", 4)])
def test_it_goes_on_wherever_it_ended(kind: str, request: Any, tmp_path: Path, writes: int) -> None:
    text, objects = request.getfixturevalue(kind), {"text": 3, "chat": 4}[kind]
    whole = written(text, tmp_path / "whole")
    read, request = source_request(job(**text))
    store: Any = FailingStore(open_store(str(tmp_path / "out")), writes)
    with pytest.raises(Killed):
        write_shards(read, request, store, Options(1, SHARD))
    if writes:
        with pytest.raises(DataError, match=r"has no tokens\.json: the shards are not finished|no file"):
            data_identity(job(kind="tokens", path=str(tmp_path / "out")))
    kept: list[int] = []
    assert written(text, tmp_path / "out", stored=kept.append) == whole
    assert kept == [max(0, (writes - 1) // objects)]
    files = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_file())
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert written(text, tmp_path / "out") == whole


def test_a_folder_of_other_data_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    written(text, tmp_path / "out")
    Path(text["path"]).write_text("changed")
    with pytest.raises(DataError, match="holds shards of other data"):
        written(text, tmp_path / "out")


@pytest.mark.parametrize("data", [{"kind": "synthetic"}, {"kind": "mixture", "parts": [{"kind": "synthetic"}]}])
def test_only_text_can_be_tokenised(data: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"has no text|no part has text"):
        outputs_of(job(**data))


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
    reported = changed(MANIFEST, json.dumps(other).encode())
    assert "written with another tokenizer (abc, end id 256; not bytes, end id 256)" in reported
    (out / "more").mkdir()
    (out / "more" / "shard-000000.ids").write_bytes(b"1")
    assert "has shards in 2 folders" in said()
    (out / "more" / "shard-000000.ids").unlink()
    (out / "shard-000003.ids").unlink()
    assert "shard-000003.ids, which is missing" in said()
    assert (out / PLAN).exists() and manifest.plan.dtype == "uint16"


def test_damaged_loss_masks_are_named(chat: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    written(chat, out)
    bits = (out / "shard-000001.loss").read_bytes()
    for number, (content, what) in enumerate(
        [
            (bytes([bits[0] ^ 4]) + bits[1:], "shard-000001.loss at byte 0 is damaged (its CRC-32 differs)"),
            (bits[:-1], "shard-000001.loss, which has"),
            (None, "shard-000001.loss, which is missing"),
        ]
    ):
        monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / f"cache-{number}"))
        if content is None:
            (out / "shard-000001.loss").unlink()
        else:
            (out / "shard-000001.loss").write_bytes(content)
        with pytest.raises(DataError) as caught:
            rows({"kind": "tokens", "path": str(out)})
        assert what in str(caught.value)
    (out / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"shard-000001\.loss is missing\n  fix: remove shard-000001\.json"):
        written(chat, out)


def test_rows_that_cannot_be_used_end_it_with_the_first_and_their_number(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "completion": "b"}'] * 20 + ['{"prompt": 3}'] * 900
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        written({"kind": "chat", "path": str(tmp_path / "a.jsonl")}, tmp_path / "out")
    assert "a.jsonl:21: " in str(caught.value) and "897 more rows cannot be used" in str(caught.value)


def test_a_mixture_is_tokenised_part_by_part(text: dict[str, Any], chat: dict[str, Any], tmp_path: Path) -> None:
    template = {"chat_template": chat["chat_template"]}
    parts = [
        {**text, "weight": 3, "epochs": 2},
        {"kind": "chat", "path": chat["path"]},
        {"kind": "synthetic", "weight": 0.5},
        {**text, "tokens": 900},
    ]
    source = job(kind="mixture", parts=parts, seq_len=64, eval={"fraction": 0.1}, **template)
    urls = {}
    for output in outputs_of(source):
        urls[output.key] = str(tmp_path / "out" / output.name)
        write_shards(output.read, output.request, open_store(urls[output.key]), Options(1, SHARD))
    assert list(urls) == ["data.parts[0]", "data.parts[1]", "data.parts[3]"]
    assert {Path(url).name for url in urls.values()} == {"source", "chats", "source-2"}
    section = section_of_shards(source, urls)
    assert section["parts"][0] == {
        "kind": "tokens", "path": urls["data.parts[0]"], "name": "source", "weight": 3.0, "epochs": 2.0
    }  # fmt: skip
    with loading(source) as one, loading(job(**section)) as other:
        assert one.identity == other.identity
        assert as_lists(rows_of(one.next_step() for _ in range(30))) == as_lists(
            rows_of(other.next_step() for _ in range(30))
        )
        assert one.position() == other.position() and one.used() == other.used()
        assert as_lists(rows_of(one.held_out())) == as_lists(rows_of(other.held_out()))


def test_held_out_data_of_its_own_are_tokenised_too(text: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held\n\nout")
    source = job(**text, eval={"path": str(tmp_path / "held.txt")}, seq_len=64)
    urls = {}
    for output in outputs_of(source):
        urls[output.key] = str(tmp_path / "out" / output.name)
        write_shards(output.read, output.request, open_store(urls[output.key]), Options(1, SHARD))
    shards = job(**section_of_shards(source, urls))
    assert data_identity(shards) == data_identity(source)
    held_out = open_documents(shards).held_out
    assert held_out is not None and texts_of(held_out) == ["held", "out"]


@pytest.mark.parametrize("data", ["text", "chat"])
def test_a_sample_of_all_documents_of_shards_is_that_of_the_source(data: str, request: Any, tmp_path: Path) -> None:
    source = request.getfixturevalue(data)
    written(source, tmp_path / "out")
    one, other = look_at(job(**source), 3), look_at(job(kind="tokens", path=str(tmp_path / "out")), 3)
    assert (one.tokens, one.loss_tokens, one.counts) == (other.tokens, other.loss_tokens, other.counts)
    for first, second in zip(one.first, other.first, strict=True):
        assert all((a.loss == b.loss).all() and (a.ids == b.ids).all() for a, b in zip(first, second, strict=True))


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
