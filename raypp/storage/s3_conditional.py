"""Creates an object exactly once: by If-None-Match, or by bids if the server ignores that.

A probe on the server itself decides which of the two is used.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from raypp.errors import Problem
from raypp.storage.store import AlreadyExists, Data, ObjectInfo, StoreError

log = logging.getLogger(__name__)

BIDS = ".raypp-bids"
"""The folder of bids under the store's prefix; hidden from callers."""
DEAD_BID_S = 120.0
"""A process that has observed a bid for this long, on its own clock, takes its writer for dead."""
_FRESH_S = DEAD_BID_S / 4


class ConditionNotSupported(StoreError):
    """The server rejected a conditional write as unsupported."""


class PlainStore(Protocol):
    """What bids need: reads and lists that see every write that ended before they began."""

    @property
    def url(self) -> str: ...
    def put(self, key: str, data: Data) -> None: ...
    def get(self, key: str) -> bytes: ...
    def head(self, key: str) -> ObjectInfo | None: ...
    def list_all(self, prefix: str) -> Iterator[ObjectInfo]: ...
    def delete(self, keys: list[str]) -> None: ...


class ConditionalStore(PlainStore, Protocol):
    def put_if_none_match(self, key: str, data: Data) -> None:
        """Writes an object with If-None-Match.

        Raises:
            AlreadyExists: The object exists.
            ConditionNotSupported: The server rejected the header itself.
        """
        ...


class ExclusiveCreate:
    """Creates objects that do not exist yet, in the way that the server supports.

    Args:
        store: The store to write to.
        dead_bid_s: See DEAD_BID_S.
    """

    def __init__(self, store: ConditionalStore, dead_bid_s: float = DEAD_BID_S) -> None:
        self._store = store
        self._dead_bid_s = dead_bid_s
        self._honoured: bool | None = None
        self._lock = threading.Lock()

    def create(self, key: str, data: Data) -> None:
        """Creates the object.

        Raises:
            AlreadyExists: It exists.
            StoreError: The write failed.
        """
        if self.condition_is_honoured():
            self._store.put_if_none_match(key, data)
        else:
            create_by_bids(self._store, key, data, self._dead_bid_s)

    def condition_is_honoured(self) -> bool:
        """Returns whether the server honours If-None-Match: probed once, then remembered."""
        with self._lock:
            if self._honoured is None:
                self._honoured = probe_condition(self._store)
                if not self._honoured:
                    log.warning("%s", limitation(self._store.url))
            return self._honoured


def limitation(url: str) -> Problem:
    """Describes the limitation of a server without conditional writes."""
    return Problem(
        url,
        "this server ignores If-None-Match, so raypp creates claims and commits by bids: marker objects, a list "
        f"that shows who else bids, and a read-back. That is slower, and safe unless a writer stalls for more "
        f"than {_FRESH_S:.0f} s in between",
        "use a store that supports it: AWS S3, SeaweedFS, Ceph, MinIO, or a directory",
    )


def probe_condition(store: ConditionalStore) -> bool:
    """Returns whether a conditional write over a small temporary object is refused."""
    key = f".raypp-probe-{secrets.token_hex(8)}"
    store.put(key, b"first")
    try:
        store.put_if_none_match(key, b"second")
    except AlreadyExists:
        return True
    except ConditionNotSupported:
        return False
    finally:
        store.delete([key])
    return False


def create_by_bids(store: PlainStore, key: str, data: Data, dead_bid_s: float = DEAD_BID_S) -> None:
    """Creates an object with plain writes, lists and reads only.

    Every writer that wants the key first writes its own bid, then lists the bids. Of any two
    writers, the one that lists later sees the other's bid. Only a writer that sees no other bid may
    write, and it removes its bid afterwards. So no two write at the same time, and the next one
    finds the object. If several meet, the lowest bid stays and the others are withdrawn. A dead
    writer's bid blocks the key until another writer has observed it for `dead_bid_s` on its own
    clock; clocks of different hosts are never compared.

    Raises:
        AlreadyExists: The object exists.
        StoreError: The write failed, or dead bids blocked it for too long.
    """
    folder = f"{BIDS}/{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    mine = f"{folder}/{secrets.token_hex(12)}"
    exists = AlreadyExists(Problem(f"{store.url}/{key}", "already exists"))
    seen: dict[str, float] = {}
    placed = False
    body = bytes(data)
    end = time.monotonic() + 5 * dead_bid_s
    try:
        while time.monotonic() < end:
            if store.head(key) is not None:
                raise exists
            if not placed:
                store.put(mine, key.encode())
                placed = True
            began = time.monotonic()
            others = {info.key for info in store.list_all(f"{folder}/")} - {mine}
            if not others:
                if store.head(key) is not None:
                    raise exists
                if time.monotonic() - began > dead_bid_s / 4:
                    continue  # this writer stalled: others may have taken it for dead
                store.put(key, body)
                if store.get(key) != body:
                    raise exists
                return
            now = time.monotonic()
            seen = {other: seen.get(other, now) for other in others}
            dead = [other for other, since in seen.items() if now - since > dead_bid_s]
            if dead:
                store.delete(dead)
            elif min(others) < mine:
                store.delete([mine])
                placed = False
            time.sleep(random.uniform(0.02, 0.1) if len(seen) < 16 else random.uniform(0.1, 1.0))
    finally:
        if placed:
            store.delete([mine])
    raise StoreError(
        Problem(
            f"{store.url}/{key}",
            f"other writers have been bidding for it for {5 * dead_bid_s:.0f} s",
            f"if no run uses it, delete what is below {store.url}/{folder}",
        )
    )
