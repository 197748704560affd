"""A real server is killed (SIGKILL) mid-operation and restarted elsewhere with the same data."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, Request, asks
from saving import PART, committed, newest, saved, store_at
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.storage.s3 import S3Store
from raypp.storage.store import Patience

pytestmark = pytest.mark.slow


class Mortal:
    """A server behind a fixed address, killed at a chosen request, restarted once it was missed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = SeaweedServer.start(directory, buckets=(BUCKET,))
        self.proxy = FaultProxy(self.server.endpoint)
        self.returning: threading.Thread | None = None

    def kill_at(self, wanted: Callable[[Request], bool], after_it: bool) -> None:
        """Kills the server before or after it carries out the next such request."""
        if after_it:
            self.proxy.add(wanted, then=self._kill, lose_answer=True)
        else:

            def kill_first(request: Request) -> bool:
                if not wanted(request) or self.returning is not None:
                    return False
                self._kill()
                return False

            self.proxy.add(kill_first)

    def store(self) -> S3Store:
        patience = Patience(120.0, 120.0)
        return store_at(self.proxy, self.server, "mortal", part_bytes=PART, patience=patience, timeout_s=20.0)

    def back(self) -> None:
        assert self.returning is not None, "it was not killed"
        self.returning.join()

    def close(self) -> None:
        if self.returning is not None:
            self.returning.join()
        self.proxy.close()
        self.server.stop(grace_s=0.2)

    def _kill(self) -> None:
        if self.returning is None:
            self.proxy.upstream = "http://127.0.0.1:9"
            self.server.stop(grace_s=0)
            self.returning = threading.Thread(target=self._return)
            self.returning.start()

    def _return(self) -> None:
        before = len(self.proxy.seen)
        end = time.monotonic() + 5
        while len(self.proxy.seen) == before and time.monotonic() < end:  # until somebody has missed it
            time.sleep(0.05)
        self.server = SeaweedServer.start(self.directory)
        self.proxy.upstream = self.server.endpoint


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mortal]:
    mortal = Mortal(tmp_path)
    try:
        yield mortal
    finally:
        mortal.close()


@pytest.mark.parametrize("after_it", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(asks("PUT", "partNumber=2"), id="upload"),
        pytest.param(asks("POST", "uploadId="), id="completion"),
        pytest.param(asks("PUT", "/COMMIT"), id="commit", marks=pytest.mark.gate),
    ],
)
def test_a_save_outlives_the_kill_of_its_server(
    place: Callable[[Request], bool], after_it: bool, mortal: Mortal, run: str
) -> None:
    store = mortal.store()
    rank = saved(store, run, 1)
    mortal.kill_at(place, after_it)
    assert rank.save_and_wait(2), rank.failures()
    mortal.back()
    assert committed(store, run) == [1, 2]
    assert newest(store, run) == (2, [])
    assert rank.loads(store, 1) and rank.loads(store, 2)


@pytest.mark.gate
def test_a_load_outlives_the_kill_of_its_server(mortal: Mortal, run: str) -> None:
    store = mortal.store()
    rank = saved(store, run, 1)
    mortal.kill_at(asks("GET", ".safetensors"), after_it=False)
    assert rank.loads(store, 1)
    mortal.back()
