from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.storage import AccessRefused, StoreError, open_store
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_files_are_private(store: DirectoryStore) -> None:
    store.put("a/b", b"secret")
    store.put("a/c", b"secret", if_absent=True)
    for name in ("a/b", "a/c"):
        assert stat.S_IMODE((store.root / name).stat().st_mode) == 0o600


def test_a_folder_goes_with_its_last_object(store: DirectoryStore) -> None:
    store.put("run/step-1/COMMIT", b"")
    store.delete(["run/step-1/COMMIT"])
    assert not (store.root / "run").exists()


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(store: DirectoryStore) -> None:
    def work(number: int) -> None:
        for _ in range(100):
            store.put(f"folder/{number}", b"x", if_absent=True)
            store.delete([f"folder/{number}"])

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_what_a_killed_writer_left_is_swept_by_probe_after_a_day(store: DirectoryStore) -> None:
    store.put("a", b"")
    left = store.root / ".raypp-incoming" / "left"
    left.write_bytes(b"half")
    store.probe()
    assert left.exists()
    os.utime(left, (0, 0))
    store.probe()
    assert not left.exists()


def test_a_file_where_a_folder_is_needed_is_told(store: DirectoryStore) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError, match="a file is where a folder is needed"):
        store.put("a/b", b"", if_absent=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessRefused, match="not allowed"):
        open_store(str(tmp_path / "new")).probe()


def test_a_file_as_a_store_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        open_store(str(tmp_path / "file")).probe()


@pytest.mark.parametrize("url", ["{}", "file://{}", "file://localhost{}", "{}/"])
def test_a_directory_is_opened_by_path_or_file_url(url: str, tmp_path: Path) -> None:
    assert open_store(url.format(tmp_path)).url == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
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
def test_a_wrong_url_is_an_error_of_the_job_that_says_what_is_right(url: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        open_store(url)
    assert said in str(caught.value)
