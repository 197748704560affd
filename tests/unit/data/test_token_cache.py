import os
from pathlib import Path

import numpy as np
import pytest
from data_jobs import as_lists, job, loading, rows_of, texts_of

from raypp.errors import DataError
from raypp.rank.data.sources import open_documents
from raypp.rank.data.tokenizer import ByteTokenizer
from raypp.storage.node_cache import cache_directory, made_once


@pytest.fixture
def everything_is_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypp.rank.data.tokenised.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("raypp.rank.data.tokens.IN_MEMORY_BYTES", 0)


def text(tmp_path: Path, content: str = "one\n\ntwo\n\nthree") -> Path:
    (tmp_path / "a.txt").write_text(content)
    return tmp_path / "a.txt"


def test_big_text_gives_the_rows_and_the_identity_of_small_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job(kind="text", path=str(text(tmp_path)))
    with loading(request) as loader:
        rows, identity = as_lists(rows_of([loader.next_step()])), loader.identity
    monkeypatch.setattr("raypp.rank.data.tokenised.IN_MEMORY_BYTES", 0)
    for _ in range(2):  # created, then found
        with loading(request) as loader:
            assert as_lists(rows_of([loader.next_step()])) == rows
            assert loader.identity == identity
            assert isinstance(loader.documents.train.shards[0], np.memmap)


@pytest.mark.usefixtures("everything_is_big")
def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = text(tmp_path)
    request = job(kind="text", path=str(file))
    open_documents(request)
    with monkeypatch.context() as patch:
        patch.setattr("raypp.rank.data.tokenised._write", None)  # must not tokenise again
        assert texts_of(open_documents(request).train) == ["one", "two", "three"]
    file.write_text("one\n\ntwo\n\nfours")
    assert texts_of(open_documents(request).train) == ["one", "two", "fours"]
    assert len([entry for entry in (cache / "tokens").iterdir() if entry.is_dir()]) == 2


@pytest.mark.usefixtures("everything_is_big")
def test_documents_that_were_kept_with_another_end_are_tokenised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job(kind="text", path=str(text(tmp_path)))
    open_documents(request)
    monkeypatch.setattr(ByteTokenizer, "eos_id", 255)
    assert open_documents(request).train.ids(0)[-1] == 255


@pytest.mark.usefixtures("everything_is_big")
def test_the_index_of_big_token_files_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 256, 2, 3]))
    request = job(kind="tokens", path=str(tmp_path))
    first = open_documents(request)
    monkeypatch.setattr("raypp.rank.data.tokens._scan", None)
    again = open_documents(request)
    assert again.identity == first.identity
    assert again.train.lengths().tolist() == [2, 2]


@pytest.mark.usefixtures("everything_is_big")
def test_an_error_in_the_data_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{')
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:2: is not JSON"):
            open_documents(job(kind="jsonl", path=str(tmp_path)))
    assert not [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()]


@pytest.mark.usefixtures("everything_is_big")
def test_a_torn_entry_is_named(tmp_path: Path, cache: Path) -> None:
    request = job(kind="text", path=str(text(tmp_path)))
    open_documents(request)
    (entry,) = (entry for entry in (cache / "tokens").iterdir() if entry.is_dir())
    os.truncate(entry / "tokens", 1)
    with pytest.raises(DataError, match="delete"):
        open_documents(request)


def test_what_a_process_left_when_it_died_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".entry-dead").mkdir()
    (tmp_path / ".entry-dead" / "half").write_text("x")
    made_once(tmp_path / "entry", lambda room: (room / "whole").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry", "entry.lock"]
    assert [file.name for file in (tmp_path / "entry").iterdir()] == ["whole"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="RAYPP_CACHE_DIR"):
        made_once(tmp_path / "file" / "tokens" / "entry", lambda room: None)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_CACHE_DIR", "/here")
    assert cache_directory() == Path("/here")
    monkeypatch.delenv("RAYPP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache_directory() == Path("/there/raypp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "raypp"
