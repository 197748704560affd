"""A directory as a store, in which a stranger has placed something: links, FIFOs, odd names."""

import logging
import os
import socket
from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.storage import NotFound, StoreError, Unfinished, directory
from raypp.storage import store as stores
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "store")
    store.put("run/step-1/data", b"data")
    return store


def keys(store: DirectoryStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_loops_of_links_are_passed_over_with_a_warning(store: DirectoryStore, caplog: pytest.LogCaptureFixture) -> None:
    (store.root / "run" / "up").symlink_to("..")
    (store.root / "run" / "here").symlink_to(".")
    (store.root / "run" / "itself").symlink_to("itself")
    (store.root / "run" / "nothing").symlink_to("gone")
    with caplog.at_level(logging.WARNING):
        assert keys(store) == keys(store, "run/") == ["run/step-1/data"]
    assert "'run/here', which is a link to a folder around it" in caplog.text
    with pytest.raises(StoreError, match="run/itself"):
        store.get("run/itself")
    with pytest.raises(StoreError, match="run/itself"):
        store.head("run/itself")


def test_folders_that_link_to_each_other_end_in_words(store: DirectoryStore) -> None:
    """Thirty folders, each with two links to the next: a billion paths."""
    for number in range(30):
        folder = store.root / f"f{number:02}"
        folder.mkdir()
        for name in ("a", "b"):
            (folder / name).symlink_to(f"../f{number + 1:02}")
    with pytest.raises(StoreError, match="more than 1,000 links to folders"):
        keys(store)


def test_only_regular_files_are_objects(store: DirectoryStore, caplog: pytest.LogCaptureFixture) -> None:
    run = store.root / "run"
    os.mkfifo(run / "fifo")
    (run / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        place = Path.cwd()
        os.chdir(run)  # a socket's name may have 108 bytes
        try:
            listener.bind("socket")
        finally:
            os.chdir(place)
        with caplog.at_level(logging.WARNING):
            assert keys(store) == ["run/step-1/data"]
        assert "'run/fifo', which is a FIFO" in caplog.text
        for name, kind in (("fifo", "a FIFO"), ("zero", "a device"), ("socket", "a socket")):
            with pytest.raises(StoreError, match=f"run/{name}: is {kind}"):
                store.get(f"run/{name}")
            with pytest.raises(StoreError, match=f"run/{name}"):
                store.head(f"run/{name}")
    with pytest.raises(NotFound):
        store.get("run/step-1")
    store.delete(["run/fifo", "run/zero", "run/socket"])
    assert sorted(path.name for path in run.iterdir()) == ["step-1"]


def test_names_that_no_store_holds_are_passed_over(store: DirectoryStore, caplog: pytest.LogCaptureFixture) -> None:
    os.mkdir(os.fsencode(store.root) + b"/run/\xff")  # noqa: PTH102 - no text names it
    for name in (b"\xfe\xff", b"\xff/inside", b"a\nb", b"\x1b[2J", b"back\\slash"):
        Path(os.fsdecode(os.fsencode(store.root) + b"/run/" + name)).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert keys(store) == ["run/step-1/data"]
    assert caplog.text.count("passes over") == 1
    assert not any(letter in caplog.text for letter in "\x1b\udcff")
    with pytest.raises(JobError, match="not UTF-8"):
        store.get("run/\udcfe")


def test_folders_may_be_as_deep_as_keys_may_be_long(store: DirectoryStore, caplog: pytest.LogCaptureFixture) -> None:
    here = os.open(store.root, os.O_RDONLY)
    for _ in range(480):  # deeper than a key is long
        os.mkdir("dd", dir_fd=here)
        inner = os.open("dd", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with caplog.at_level(logging.WARNING):
        assert keys(store) == ["run/step-1/data"]
    assert "longer than 900 bytes" in caplog.text


def test_a_listing_is_bounded(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MOST_LISTED", 5)
    for number in range(5):
        (store.root / f"file{number}").touch()
    with pytest.raises(StoreError, match="more than 5 files"):
        keys(store)
    (store.root / "file5").touch()
    with pytest.raises(StoreError, match="more than 5 files"):
        keys(store)


def test_a_file_without_data_is_not_read_whole(store: DirectoryStore) -> None:
    path = store.root / "run" / "status.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(StoreError, match=f"at most {stores.MOST_WHOLE_BYTES:,} are read at once"):
        store.get("run/status.json")
    assert store.get("run/status.json", 1 << 39, (1 << 39) + 3) == bytes(3)
    assert store.get("run/status.json", (1 << 40) - 2, 1 << 50) == bytes(2)
    assert store.get("run/status.json", 1 << 45) == b""


def test_links_are_read_and_a_runs_folder_may_be_one(store: DirectoryStore, tmp_path: Path) -> None:
    """As the cache of Hugging Face links its files, and users a run to another disk."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "blob").write_bytes(b"blob")
    (store.root / "run" / "link").symlink_to(elsewhere / "blob")
    (store.root / "other").symlink_to(elsewhere)
    assert store.get("run/link") == store.get("other/blob") == b"blob"
    assert keys(store, "other/") == ["other/blob"]
    store.put("other/new", b"1")
    store.put("other/deep/new", b"1")
    store.delete(["other/new", "other/deep/new"])
    assert keys(store, "other/") == ["other/blob"]


def test_nothing_is_changed_outside_through_a_link_inside_a_run(store: DirectoryStore, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_bytes(b"mine")
    (store.root / "run" / "step-2").symlink_to(elsewhere)
    for change in (
        lambda: store.delete(["run/step-2/thesis"]),
        lambda: store.put("run/step-2/thesis", b"theirs"),
        lambda: store.put("run/step-2/a/b", b"theirs", if_absent=True),
        lambda: store.put_stream("run/step-2/new", [b"theirs"], 6),
    ):
        with pytest.raises(StoreError, match="where raypp changes nothing"):
            change()
    assert [path.read_bytes() for path in elsewhere.iterdir()] == [b"mine"]
    (store.root / "run" / "step-3").symlink_to("step-1")
    store.put("run/step-3/more", b"1")  # inside


def test_the_folder_of_temporary_files_is_no_link(store: DirectoryStore, tmp_path: Path) -> None:
    """`probe` deletes what is old there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_bytes(b"mine")
    os.utime(elsewhere / "thesis", (0, 0))
    (store.root / f".raypp-incoming-{os.geteuid()}").rmdir()
    (store.root / f".raypp-incoming-{os.geteuid()}").symlink_to(elsewhere)
    for use in (store.probe, lambda: store.put("run/x", b"1"), store.limitations):
        with pytest.raises(StoreError, match="is a link"):
            use()
    assert (elsewhere / "thesis").exists()


def test_unfinished_writes_are_files_with_names_of_keys(store: DirectoryStore) -> None:
    incoming = store.root / f".raypp-incoming-{os.geteuid()}"
    (incoming / "run%2Fnew~0123456789abcdef").write_bytes(b"half")
    for name in ("..%2F..%2Fetc~0123456789abcdef", "%1B[2J~0123456789abcdef", "\udcff~0123456789abcdef"):
        (incoming / name).touch()
    (incoming / "folder~0123456789abcdef").mkdir()
    found = list(store.unfinished())
    assert [one.key for one in found] == ["run/new"]
    store.discard(found)
    assert not list(store.unfinished())


def test_only_temporary_files_are_discarded(store: DirectoryStore) -> None:
    (store.root / "run" / "thesis").write_bytes(b"mine")
    store.discard([Unfinished("run/x", "run/thesis", 0.0), Unfinished("run/x", "thesis", 0.0)])
    assert (store.root / "run" / "thesis").exists()
