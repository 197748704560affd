import errno
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.storage import AccessRefused, StoreError, open_for_others, open_store
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_files_are_private(store: DirectoryStore) -> None:
    store.put("a/b", b"secret")
    store.put("a/c", b"secret", if_absent=True)
    for name in ("a/b", "a/c"):
        assert stat.S_IMODE((store.root / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_public_files_have_the_modes_that_the_umask_leaves(
    tmp_path: Path, mask: int, file: int, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    before = os.umask(mask)
    try:
        with open_for_others(str(tmp_path / "out")) as store:
            store.put("a", b"weights")
            store.put_stream("part/b", [b"weights"], 7)
            store.put("c", b"weights", if_absent=True)
            monkeypatch.setattr(os, "link", refuse)
            store.put("d", b"weights", if_absent=True)
    finally:
        os.umask(before)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["a", "c", "d", "part"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {file}
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((out / "part").stat().st_mode) == folder


def test_a_folder_of_temporary_files_stays_while_another_process_writes(tmp_path: Path) -> None:
    with open_for_others(str(tmp_path)) as store:
        store.put("a", b"")
        other = tmp_path / f".raypp-incoming-{os.geteuid()}" / "b~0123456789abcdef"
        other.write_bytes(b"half")
    assert other.exists()


def test_writers_go_on_while_others_end_and_remove_the_folder_of_temporary_files(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for turn in range(50):
            with open_for_others(str(tmp_path)) as store:
                store.put(f"{number}-{turn}", b"x")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(list(tmp_path.iterdir())) == 200


def test_a_listing_looks_into_no_folder_that_cannot_hold_what_is_wanted(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's, and closed."""
    for key in ("a-run/step-1/x", "a-run/step-2/x", "b-run/x", "a-key"):
        store.put(key, b"")
    looked, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(str(path.relative_to(store.root))) or scan(path))
    assert [info.key for info in store.list("a-run/step-1")] == ["a-run/step-1/x"]
    assert looked == ["a-run", "a-run/step-1"]
    assert [info.key for info in store.list("a-")] == ["a-key", "a-run/step-1/x", "a-run/step-2/x"]
    assert "b-run" not in looked


def test_a_folder_goes_with_its_last_object(store: DirectoryStore) -> None:
    store.put("run/step-1/COMMIT", b"")
    store.delete(["run/step-1/COMMIT"])
    assert not (store.root / "run").exists()


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(store: DirectoryStore) -> None:
    def work(number: int) -> None:
        for _ in range(100):
            store.put(f"folder/{number}", b"x", if_absent=True)
            store.delete([f"folder/{number}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_what_a_killed_writer_left_is_swept_by_probe_after_a_day(store: DirectoryStore) -> None:
    store.put("a", b"")
    left = store.root / f".raypp-incoming-{os.geteuid()}" / "left"
    left.write_bytes(b"half")
    store.probe()
    assert left.exists()
    os.utime(left, (0, 0))
    store.probe()
    assert not left.exists()


def test_a_file_where_a_folder_is_needed_is_reported(store: DirectoryStore) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError, match="a file is where a folder is needed"):
        store.put("a/b", b"", if_absent=True)
    with pytest.raises(StoreError, match="is a file"):
        open_store(str(store.root / "a")).probe()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessRefused, match="not allowed"):
        open_store(str(tmp_path / "new")).probe()


def test_a_link_to_nothing_as_a_store_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a disk is not mounted."""
    (tmp_path / "store").symlink_to(tmp_path / "gone" / "disk")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(StoreError, match="check that this machine can reach the directory"):
        open_store(str(tmp_path / "store")).put("a", b"")


@pytest.mark.parametrize("url", ["{}", "file://{}", "file://localhost{}", "{}/"])
def test_a_directory_is_opened_by_path_or_file_url(url: str, tmp_path: Path) -> None:
    assert open_store(url.format(tmp_path)).url == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is empty"),
        ("gs://bucket/x", "no store 'gs'; there are: file, s3"),
        ("s3a://bucket", "did you mean 's3'"),
        ("s3:/bucket", "did you mean s3://bucket"),
        ("s3://", "not of the form"),
        ("s3://Bad_Bucket/x", "not of the form"),
        ("s3://bucket/../x", "'..'"),
        ("file://host/x", "names the host"),
        ("://x", "is not a URL"),
    ],
)
def test_a_wrong_url_is_an_error_of_the_job_that_says_what_is_right(url: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        open_store(url)
    assert message in str(caught.value)
