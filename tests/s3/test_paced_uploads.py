"""Tests how a save is uploaded to a real server: within its bandwidth cap, at low priority, without
copies."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saving import PART
from seaweed import BUCKET, seaweed

from raypp.storage.byte_source import MemorySource
from raypp.storage.directory import DirectoryStore
from raypp.storage.other_traffic import OtherTraffic
from raypp.storage.rate_limit import YIELDED, Abandoned, Pace
from raypp.storage.s3 import S3Store
from raypp.storage.s3_upload import low_priority_options
from raypp.storage.store import ObjectStore

pytestmark = pytest.mark.s3
HEAD = 1000


@pytest.fixture(scope="module")
def store() -> Iterator[S3Store]:
    with seaweed() as server:
        store = server.store(BUCKET, "paced", part_bytes=PART)
        store.put("warm-up", b"the first write makes the server's volumes")
        yield store


def random_bytes(size: int) -> memoryview:
    return memoryview(np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)).cast("B")


def source_of(data: memoryview, pace: Pace | None = None) -> MemorySource:
    """Returns a source of two buffers. The first is available a little later, like a header."""
    ready = threading.Event()
    threading.Timer(0.05, ready.set).start()

    def buffer(index: int) -> memoryview:
        if index == 0:
            assert ready.wait(5)
        return data[HEAD:] if index else data[:HEAD]

    return MemorySource((HEAD, len(data) - HEAD), buffer, pace)


@pytest.mark.parametrize("size", [HEAD, PART, PART + 1, 3 * PART + 12345])
def test_what_comes_from_memory_arrives_whole(store: S3Store, size: int) -> None:
    data = random_bytes(size)
    store.put_stream("memory", source_of(data), size)
    assert store.get("memory") == bytes(data)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DirectoryStore]:
    """A directory in memory if there is one, because a busy disk syncs slower than the cap."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield DirectoryStore(Path(folder))


@pytest.mark.parametrize("kind", ["s3, one request", "s3, parts", "directory"])
def test_the_cap_holds_within_a_tenth(store: S3Store, directory: DirectoryStore, kind: str) -> None:
    size = 4 << 20 if kind == "s3, one request" else 11 << 20
    cap = size / 1.5
    place: ObjectStore = directory if kind == "directory" else store
    data, rates = random_bytes(size), []
    for _ in range(60):  # a server that is slow for a moment does not violate the cap, a fast one does
        started = time.monotonic()
        place.put_stream("paced", source_of(data, Pace(cap)), size)
        rates.append(size / (time.monotonic() - started) / cap)
        assert rates[-1] < 1.1
        if rates[-1] > 0.9:
            break
    assert rates[-1] > 0.9, rates
    assert place.get("paced") == bytes(data)


def test_the_bytes_go_out_evenly_and_not_in_bursts() -> None:
    pace, begun, sent = Pace(1e6), time.monotonic(), []
    threads = [threading.Thread(target=lambda: [take(pace, sent) for _ in range(6)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for moment, total in zip(sorted(sent), range(pace.piece_bytes, 10**9, pace.piece_bytes), strict=False):
        assert total <= (moment - begun) * 1e6 + pace.piece_bytes, "ahead of the cap by more than a piece"


def take(pace: Pace, sent: list[float]) -> None:
    pace.take(pace.piece_bytes)
    sent.append(time.monotonic())


@pytest.mark.parametrize("others", ["idle", "always under way"])
def test_an_upload_gives_way_to_messages_but_not_to_itself(store: S3Store, others: str) -> None:
    """The server is on loopback, so loopback counts here: the upload's own connections must not."""
    size = 3 * PART
    data, cap = random_bytes(size), size / 1.0
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
    if others == "idle":
        assert pace.yielded_s == 0
    else:
        assert pace.yielded_s > 0.8 * YIELDED * size / cap


def test_an_upload_that_is_given_up_ends_at_once_and_leaves_nothing(store: S3Store) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    size = 3 * PART
    with pytest.raises(Abandoned):
        store.put_stream("given-up", source_of(random_bytes(size), Pace(size / 60, stop.is_set)), size)
    assert time.monotonic() - started < 30
    assert store.head("given-up") is None
    assert list(store.unfinished("given-up")) == []


def test_connections_of_a_store_have_low_priority_where_the_system_allows_it(store: S3Store) -> None:
    options = low_priority_options()
    if not options:
        pytest.skip("this system lets nobody set a priority")
    session: Any = store._clients.current._endpoint.http_session._session  # type: ignore[attr-defined]
    assert store.endpoint is not None
    connection = session._manager.connection_from_url(store.endpoint)._get_conn()
    connection.connect()
    with connection.sock as opened:
        for level, name, value in options:
            assert opened.getsockopt(level, name) == value
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "boto3's own options stay"
