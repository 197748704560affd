"""A directory as a store when others write, links fail, or the file system is of another kind."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from store_contract import assert_one_of_eight_writers_wins

from raypp.state.checkpoint.commit import claim_next_attempt
from raypp.state.checkpoint.retention import find_leftovers, remove_leftovers
from raypp.storage import AlreadyExists, StoreError
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_a_write_goes_on_while_others_leftovers_are_removed(store: DirectoryStore) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def chunks():
        yield b"1"
        begun.set()
        go_on.wait(60)
        yield b"2"

    writer = threading.Thread(target=store.put_stream, args=("kjv/step-00000010/attempt-2/x", chunks(), 2))
    claim_next_attempt(store, "kjv")
    claim_next_attempt(store, "kjv")
    writer.start()
    begun.wait(60)
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


def test_without_hard_links_still_one_writer_wins_and_the_limitation_is_reported(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    assert store.limitations() == ()
    monkeypatch.setattr(os, "link", refuse)
    other = DirectoryStore(store.root)
    assert "no hard links" in other.limitations()[0].fault
    assert_one_of_eight_writers_wins(other)


def test_what_counts_as_forgotten_is_judged_by_the_file_systems_clock_alone(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"")
    fresh = store.root / f".raypp-incoming-{os.geteuid()}" / "fresh~1"
    fresh.write_bytes(b"half")
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this host's clock is far in the future
    store.probe()
    assert fresh.exists()
