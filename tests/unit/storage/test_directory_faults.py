"""A directory as a store: killed writers, a full disk, unusual file systems."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from store_contract import assert_one_of_eight_writers_wins

from raypp.checkpoint.commit import claim_next_attempt
from raypp.checkpoint.layout import rank_key
from raypp.checkpoint.leftovers import find_leftovers, remove_leftovers
from raypp.storage import AlreadyExists, StoreError
from raypp.storage.directory import DirectoryStore

_SLOW_WRITER = """
import sys, time
from raypp.storage.directory import DirectoryStore
from pathlib import Path
def chunks():
    for _ in range(1000):
        yield bytes(1 << 16)
        print("wrote", flush=True)
        time.sleep(0.01)
DirectoryStore(Path(sys.argv[1])).put_stream(sys.argv[2], chunks(), 1000 << 16)
"""


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def kill_a_writer(store: DirectoryStore, key: str) -> None:
    """A process that writes a large object is killed by SIGKILL in between."""
    command = [sys.executable, "-c", _SLOW_WRITER, str(store.root), key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline() == "wrote\n"
        writer.send_signal(signal.SIGKILL)


def test_a_writer_that_is_killed_in_the_middle_leaves_no_object_and_is_found(store: DirectoryStore) -> None:
    run = "kjv"
    assert claim_next_attempt(store, run) == 1
    key = rank_key(run, 10, 1, 0)
    kill_a_writer(store, key)
    assert store.head(key) is None
    assert list(store.list()) == [info for info in store.list() if "attempts/" in info.key]
    assert [left.key for left in store.unfinished(f"{run}/step-")] == [key]
    assert list(store.unfinished("another/")) == []

    assert [left.key for left in find_leftovers(store, run).under_way] == [key]  # attempt 1 may still be alive
    assert claim_next_attempt(store, run) == 2
    with_it = find_leftovers(store, run)
    assert [left.key for left in with_it.uploads] == [key]
    remove_leftovers(store, run, with_it)
    assert list(store.unfinished()) == []
    left = sorted(path.name for path in store.root.rglob("*") if path.is_file())
    assert left == ["attempt-1", "attempt-2"]


def test_a_write_goes_on_while_others_leftovers_are_removed(store: DirectoryStore) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def chunks():
        yield b"1"
        begun.set()
        go_on.wait(10)
        yield b"2"

    writer = threading.Thread(target=store.put_stream, args=("kjv/step-00000010/attempt-2/x", chunks(), 2))
    claim_next_attempt(store, "kjv")
    claim_next_attempt(store, "kjv")
    writer.start()
    begun.wait(10)
    remove_leftovers(store, "kjv", find_leftovers(store, "kjv"))
    go_on.set()
    writer.join()
    assert store.get("kjv/step-00000010/attempt-2/x") == b"12"


def test_unfinished_writes_of_keys_with_every_kind_of_character_are_found(store: DirectoryStore) -> None:
    key = "kjv/a ~ü%" + "y" * 300
    seen = []

    def chunks():
        seen.extend(store.unfinished("kjv/a ~ü"))
        yield b"1"

    store.put_stream("kjv/a ~ü", chunks(), 1)
    assert [left.key for left in seen] == ["kjv/a ~ü"]
    assert list(store.unfinished()) == []
    with pytest.raises(StoreError, match="File name too long"):
        store.put(key, b"")


def test_a_link_whose_answer_was_lost_counts_as_ours_and_only_ours(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose response was lost; the second response says the name is taken."""
    real = os.link

    def twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", twice)
    store.put("a/COMMIT", b"ours", if_absent=True)
    monkeypatch.setattr(os, "link", real)
    with pytest.raises(AlreadyExists):
        store.put("a/COMMIT", b"another's", if_absent=True)
    assert store.get("a/COMMIT") == b"ours"


def test_without_hard_links_still_one_writer_wins_and_people_are_told(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    assert store.limitations() == ()
    monkeypatch.setattr(os, "link", refuse)
    other = DirectoryStore(store.root)
    assert "no hard links" in other.limitations()[0].what
    assert_one_of_eight_writers_wins(other)


def test_what_counts_as_forgotten_is_judged_by_the_file_systems_clock_alone(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"")
    fresh = store.root / ".raypp-incoming" / "fresh~1"
    fresh.write_bytes(b"half")
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this host's clock is far in the future
    store.probe()
    assert fresh.exists()


_ON_A_FULL_DISK = """
import subprocess, sys
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", sys.argv[1]], check=True)
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]) / "store")
store.put("run/step-00000001/a", bytes(1 << 20))
for put in (lambda: store.put("run/step-00000002/big", bytes(8 << 20)),
            lambda: store.put_stream("run/step-00000002/big", (bytes(1 << 16) for _ in range(128)), 8 << 20)):
    try:
        put()
        sys.exit("it fitted")
    except StoreError as error:
        assert "run/step-00000002/big: the disk is full" in str(error), error
assert [info.key for info in store.list()] == ["run/step-00000001/a"]
assert list(store.unfinished()) == []
assert store.get("run/step-00000001/a") == bytes(1 << 20)
store.put("run/step-00000002/a", bytes(1 << 20))
store.put("run/step-00000002/COMMIT", b"{}", if_absent=True)
print("fine")
"""


def test_a_full_disk_is_told_with_the_object_and_leaves_what_was_there_and_no_half(tmp_path: Path) -> None:
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    try:
        allowed = subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine")
    if allowed.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk of their own: {allowed.stderr.strip()}")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr
