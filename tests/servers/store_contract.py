"""The contract of every store: a new store's tests inherit it and have a `store` fixture."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from raypp.errors import JobError
from raypp.storage import AlreadyExists, NotFound, ObjectStore


def assert_one_of_eight_writers_wins(store: ObjectStore) -> None:
    """Asserts that one of eight racing writers wins a key, and that the key holds its data."""
    assert_one_writer_wins([store] * 8, "race/COMMIT")


def assert_one_writer_wins(writers: Sequence[ObjectStore], key: str) -> None:
    """Asserts that one of several racing writers wins a key, and that the key holds its data."""
    start, won = threading.Barrier(len(writers)), []

    def race(number: int) -> None:
        start.wait()
        with suppress(AlreadyExists):
            writers[number].put(key, f"writer {number}".encode(), if_absent=True)
            won.append(number)

    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(race, range(len(writers))))
    (winner,) = won
    assert writers[0].get(key) == f"writer {winner}".encode()


class StoreContract:
    large = 300_000
    """Size in bytes of a large object for this store."""

    def test_what_was_put_is_got_back_whole_and_in_part(self, store: ObjectStore) -> None:
        store.put("run/a", b"0123456789")
        assert store.get("run/a") == b"0123456789"
        assert store.get("run/a", 2, 5) == b"234"
        assert store.get("run/a", 7) == b"789"
        assert store.get("run/a", None, 3) == b"012"

    def test_a_range_is_cut_off_at_the_end_like_a_slice(self, store: ObjectStore) -> None:
        store.put("a", b"0123")
        assert store.get("a", 2, 100) == b"23"
        assert store.get("a", 50, 60) == b""
        assert store.get("a", 3, 3) == b""

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        info = store.head("empty")
        assert info is not None and info.size == 0

    def test_memoryviews_and_bytearrays_can_be_put(self, store: ObjectStore) -> None:
        store.put("a", memoryview(b"xyz")[1:])
        store.put("b", bytearray(b"pq"))
        assert store.get("a") + store.get("b") == b"yzpq"

    def test_a_second_put_replaces_the_whole_object(self, store: ObjectStore) -> None:
        store.put("a", b"a long first version")
        store.put("a", b"short")
        assert store.get("a") == b"short"

    def test_put_if_absent_never_replaces(self, store: ObjectStore) -> None:
        store.put("run/COMMIT", b"first", if_absent=True)
        with pytest.raises(AlreadyExists, match="run/COMMIT"):
            store.put("run/COMMIT", b"second", if_absent=True)
        assert store.get("run/COMMIT") == b"first"

    def test_of_eight_writers_racing_for_one_key_exactly_one_wins(self, store: ObjectStore) -> None:
        assert_one_of_eight_writers_wins(store)

    def test_a_key_can_be_taken_again_after_it_was_deleted(self, store: ObjectStore) -> None:
        store.put("a/COMMIT", b"1", if_absent=True)
        store.delete(["a/COMMIT"])
        store.put("a/COMMIT", b"2", if_absent=True)
        assert store.get("a/COMMIT") == b"2"

    def test_a_stream_becomes_one_object_whatever_the_sizes_of_its_chunks(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * (self.large // 256)
        pieces = [memoryview(data)[start : start + 77_777] for start in range(0, len(data), 77_777)]
        store.put_stream("big", iter(pieces), len(data))
        assert store.get("big") == data
        assert store.get("big", len(data) - 10, len(data)) == data[-10:]

    def test_a_short_stream_is_one_object_too(self, store: ObjectStore) -> None:
        store.put_stream("small", [b"ab", b"", b"c"], 3)
        assert store.get("small") == b"abc"

    @pytest.mark.parametrize("announced", [-1, 1])
    def test_a_stream_of_another_size_than_announced_stores_nothing(self, store: ObjectStore, announced: int) -> None:
        for size in (10, self.large):
            with pytest.raises(ValueError, match="were announced"):
                store.put_stream("torn", [bytes(size)], size + announced)
            assert store.head("torn") is None

    def test_a_stream_whose_source_fails_stores_nothing(self, store: ObjectStore) -> None:
        def failing():
            yield bytes(self.large // 2)
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="the source broke"):
            store.put_stream("torn", failing(), self.large)
        assert store.head("torn") is None
        assert list(store.list("torn")) == []

    def test_a_missing_object_is_not_found(self, store: ObjectStore) -> None:
        assert store.head("nothing/here") is None
        with pytest.raises(NotFound, match="nothing/here"):
            store.get("nothing/here")
        with pytest.raises(NotFound):
            store.get("nothing/here", 0, 5)

    def test_list_goes_by_any_prefix_and_gives_sizes(self, store: ObjectStore) -> None:
        for key in ("r/step-1/x", "r/step-10/COMMIT", "r/step-2/y", "rr/z", "r/spec.json"):
            store.put(key, key.encode())
        assert {info.key: info.size for info in store.list("r/step-1")} == {"r/step-1/x": 10, "r/step-10/COMMIT": 16}
        assert {info.key for info in store.list("r/")} == {
            "r/step-1/x",
            "r/step-10/COMMIT",
            "r/step-2/y",
            "r/spec.json",
        }
        assert len(list(store.list())) == 5
        assert list(store.list("q")) == []

    def test_head_returns_size_and_time(self, store: ObjectStore) -> None:
        store.put("a", b"12345")
        info = store.head("a")
        assert info is not None and (info.key, info.size) == ("a", 5)
        assert info.modified > 1.7e9

    def test_delete_passes_over_what_is_not_there(self, store: ObjectStore) -> None:
        store.put("d/a", b"1")
        store.put("d/b", b"2")
        store.delete(["d/a", "d/missing", "never/was"])
        assert [info.key for info in store.list("d/")] == ["d/b"]
        store.delete([])

    @pytest.mark.parametrize(
        "key", ["", "/etc/passwd", "a/../b", "../a", "a//b", "a/", "./a", "a\nb", "a\\b", "x" * 1000]
    )
    def test_keys_that_could_leave_the_store_are_refused(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(JobError):
            store.put(key, b"")
        with pytest.raises(JobError):
            store.get(key)

    def test_probe_leaves_nothing_behind(self, store: ObjectStore) -> None:
        store.probe()
        assert list(store.list()) == []
