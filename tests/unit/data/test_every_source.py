"""The contract of every data source.

A source that reads files has a sample in `samples/`, named after its kind.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from data_jobs import as_lists, data_identity, job, loading, refused, rows_of

from raypp.kinds import SOURCES
from raypp.rank.data.sources import check_data, open_documents

SAMPLES = Path(__file__).parent / "samples"
KINDS = [kind.name for kind in SOURCES.usable()]
FILE_KINDS = [kind.name for kind in SOURCES.usable() if kind.endings]


def sample_of(name: str) -> Path:
    found = list(SAMPLES.glob(f"{name}.*"))
    assert len(found) == 1, f"put one file with at least three documents into tests/unit/data/samples: {name}.…"
    assert found[0].suffix in SOURCES.get(name).endings
    return found[0]


def sampled(name: str, **settings: Any) -> Any:
    if SOURCES.get(name).mixes:
        parts = [{"kind": "text", "path": str(sample_of("text"))}, {"kind": "synthetic", "num_documents": 5}]
        return job(kind=name, parts=parts, **settings)
    return job(kind=name, **({"path": str(sample_of(name))} if SOURCES.get(name).endings else {}), **settings)


@pytest.mark.parametrize("name", KINDS)
def test_documents_are_ids_of_the_model_and_the_same_every_time(name: str) -> None:
    assert check_data(sampled(name)) == []
    first, second = open_documents(sampled(name)), open_documents(sampled(name))
    assert len(first.train) >= 3
    for document in range(len(first.train)):
        ids = first.train.ids(document).tolist()
        assert ids and ids == second.train.ids(document).tolist()
        assert all(0 <= one < 320 for one in ids)
        assert first.tokenizer.eos_id not in ids[:-1]
    assert first.identity == second.identity == data_identity(sampled(name))
    assert first.identity != data_identity(sampled(name, seed=1))
    assert first.identity != data_identity(sampled(name, seq_len=8))


@pytest.mark.parametrize("name", KINDS)
def test_some_documents_can_be_held_out(name: str) -> None:
    whole, parted = open_documents(sampled(name)), open_documents(sampled(name, eval={"fraction": 0.34}))
    assert parted.held_out is not None and len(parted.held_out)
    assert len(parted.train) + len(parted.held_out) == len(whole.train)


@pytest.mark.parametrize("name", KINDS)
def test_a_loader_goes_on_where_another_was(name: str) -> None:
    with loading(sampled(name)) as first, loading(sampled(name)) as second:
        first.next_step()
        second.seek(first.position())
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))


@pytest.mark.parametrize("name", FILE_KINDS)
def test_files_are_found_by_their_ending_in_a_folder_and_their_content_counts(name: str, tmp_path: Path) -> None:
    sample = sample_of(name)
    shutil.copy(sample, tmp_path / sample.name)
    (tmp_path / "other.bin").write_bytes(b"\0")
    folder = job(kind=name, path=str(tmp_path))
    assert data_identity(folder) == data_identity(sampled(name))
    shutil.copy(sample, tmp_path / f"second{sample.suffix}")
    assert len(open_documents(folder).train) == 2 * len(open_documents(sampled(name)).train)
    assert data_identity(folder) != data_identity(sampled(name))


@pytest.mark.parametrize("name", FILE_KINDS)
def test_data_that_are_not_there_are_named(tmp_path: Path, name: str) -> None:
    assert f"no file at {tmp_path}/none" in refused(kind=name, path=f"{tmp_path}/none")
    assert f"at {tmp_path}/*.x" in refused(kind=name, path=f"{tmp_path}/*.x")
    assert "with the ending" in refused(kind=name, path=str(tmp_path))
    assert refused(kind=name) == f"data.path: is missing: kind {name} reads files"


@pytest.mark.parametrize("name", FILE_KINDS)
def test_empty_data_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "none.any").touch()
    assert refused(kind=name, path=f"{tmp_path}/none.any") == f"data.path: {tmp_path}/none.any is empty"


@pytest.mark.parametrize("name", [name for name in KINDS if name not in FILE_KINDS])
def test_a_source_without_files_has_no_path_to_hold_out(name: str) -> None:
    assert f"kind {name} reads no files" in refused(kind=name, eval={"path": "x"})
