"""How a save is uploaded: within its bandwidth cap, at low priority, without copies."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saving import PART
from seaweed import BUCKET
from stand_in_clock import StandInClock

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.storage import rate_limit
from raypp.storage.directory import DirectoryStore
from raypp.storage.rate_limit import YIELDED, Abandoned, OtherTraffic, Pace
from raypp.storage.s3 import S3Store
from raypp.storage.s3_upload import low_priority_options
from raypp.storage.store import MemorySource, ObjectStore

HEAD = 1000


@pytest.fixture
def store(seaweed_server: SeaweedServer) -> S3Store:
    return seaweed_server.store(BUCKET, "paced", part_bytes=PART)


def random_bytes(size: int) -> memoryview:
    return memoryview(np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)).cast("B")


def source_of(data: memoryview, pace: Pace | None = None) -> MemorySource:
    return MemorySource([data[:HEAD], data[HEAD:]], pace)


@pytest.mark.parametrize("size", [HEAD, PART, PART + 1, 3 * PART + 12345])
def test_what_comes_from_memory_arrives_whole(store: S3Store, size: int) -> None:
    data = random_bytes(size)
    store.put_stream("memory", source_of(data), size)
    assert store.get("memory") == bytes(data)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    """The clock of the cap: it advances only while bytes wait for their turn."""
    clock = StandInClock()
    monkeypatch.setattr(rate_limit, "time", clock)
    return clock


@pytest.mark.parametrize("kind", ["s3, one request", "s3, parts", "directory"])
def test_the_cap_holds_for_every_byte(store: S3Store, tmp_path: Path, clock: StandInClock, kind: str) -> None:
    size = 4 << 20 if kind == "s3, one request" else 11 << 20
    place: ObjectStore = DirectoryStore(tmp_path) if kind == "directory" else store
    data, pace = random_bytes(size), Pace(1e6)
    place.put_stream("paced", source_of(data, pace), size)
    assert pace.sent == size
    # Without the last piece, after which nothing waits.
    assert size - pace.piece_bytes <= clock.now * 1e6 + 1 and clock.now * 1e6 <= size
    assert place.get("paced") == bytes(data)


def test_the_bytes_go_out_evenly_and_not_in_bursts(clock: StandInClock) -> None:
    pace, sent = Pace(1e6), []

    def take(_: int) -> None:
        for _ in range(6):
            pace.take(pace.piece_bytes)
            sent.append(clock.now)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4)))
    for moment, total in zip(sorted(sent), range(0, 10**9, pace.piece_bytes), strict=False):
        assert total <= moment * 1e6 + 1, "ahead of the cap by more than a piece"


@pytest.mark.parametrize("others", ["idle", "always under way"])
def test_an_upload_gives_way_to_messages_but_not_to_itself(store: S3Store, clock: StandInClock, others: str) -> None:
    """The server is on loopback, so loopback counts here: the upload's own connections must not."""
    size = 3 * PART
    data, cap = random_bytes(size), 16e6
    traffic = OtherTraffic(is_here=lambda own, peer: False)
    pace = Pace(cap, gives_way=traffic.is_under_way)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        with socket.create_connection(listener.getsockname()) as training:
            training.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while others != "idle":
                    training.send(bytes(PART))
            store.put_stream("gives-way", source_of(data, pace), size)
    assert store.get("gives-way") == bytes(data)
    times_as_long = clock.now * cap / size
    if others == "idle":
        assert times_as_long <= 1
    else:
        assert 0.9 * (1 + YIELDED) < times_as_long < 1.1 * (1 + YIELDED)


def test_an_upload_that_is_given_up_ends_at_once_and_leaves_nothing(store: S3Store, clock: StandInClock) -> None:
    size = 3 * PART
    pace = Pace(1e6, lambda: pace.sent > PART)
    with pytest.raises(Abandoned):
        store.put_stream("given-up", source_of(random_bytes(size), pace), size)
    assert pace.sent < 2 * PART
    assert store.head("given-up") is None
    assert list(store.unfinished("given-up")) == []


def test_connections_of_a_store_have_low_priority_where_the_system_allows_it(store: S3Store) -> None:
    options = low_priority_options()
    if not options:
        pytest.skip("this system lets nobody set a priority")
    session: Any = store._clients.current._endpoint.http_session  # type: ignore[attr-defined]
    assert store.endpoint is not None
    connection = session._manager.connection_from_url(store.endpoint)._get_conn()
    connection.connect()
    with connection.sock as opened:
        for level, name, value in options:
            assert opened.getsockopt(level, name) == value
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "boto3's own options stay"
