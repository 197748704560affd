"""Creating an object exactly once: by If-None-Match, or, on a server that ignores it, by bids.

Which of the two is found out by a probe on the server itself, never assumed.
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
"""The folder of bids, below the store's prefix; never listed to callers."""
DEAD_BID_S = 120.0
"""A bid that was watched for so long by one process, on its own clock, is of a writer that died."""
_FRESH_S = DEAD_BID_S / 4


class ConditionNotSupported(StoreError):
    """The server said that it cannot do a conditional write."""


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
        """A PUT with the condition.

        Raises:
            AlreadyExists: The server refused it for that.
            ConditionNotSupported: The server refused the header itself.
        """
        ...


class ExclusiveCreate:
    """Creates objects that are not there yet, in the way the server allows.

    Args:
        store: Where.
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
            AlreadyExists: It is there.
            StoreError: It could not be written.
        """
        if self.condition_is_honoured():
            self._store.put_if_none_match(key, data)
        else:
            create_by_bids(self._store, key, data, self._dead_bid_s)

    def condition_is_honoured(self) -> bool:
        """Whether the server refuses to replace an object under If-None-Match: asked once, then remembered."""
        with self._lock:
            if self._honoured is None:
                self._honoured = probe_condition(self._store)
                if not self._honoured:
                    log.warning("%s", limitation(self._store.url))
            return self._honoured


def limitation(url: str) -> Problem:
    """What to tell people about a server without conditional writes."""
    return Problem(
        url,
        "this server ignores If-None-Match; raypp creates claims and commits by bids instead: marker objects, a list "
        f"that shows who else bids, and a read-back. That is slower, and safe unless a writer stands still for more "
        f"than {_FRESH_S:.0f} s in the middle of it",
        "better use a store that honours it: AWS S3, SeaweedFS, Ceph, MinIO, or a directory",
    )


def probe_condition(store: ConditionalStore) -> bool:
    """Writes a small object of its own, and once more under the condition: was the second write refused?"""
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

    Everyone who wants the key first writes a bid of its own beside it, then lists the bids. Of any two, the one
    that lists later sees the other's. Only who sees no other bid may write, and it takes its bid away afterwards;
    so no two write at the same time, and the next one finds the object there. When several meet, the
    lowest stays and the others step back. A bid whose writer died is in the way until somebody has watched it for
    `dead_bid_s` on a clock of its own; no two hosts' clocks are compared.

    Raises:
        AlreadyExists: It is there.
        StoreError: It could not be written, or dead bids stood in the way for too long.
    """
    folder = f"{BIDS}/{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    mine = f"{folder}/{secrets.token_hex(12)}"
    exists = AlreadyExists(Problem(f"{store.url}/{key}", "is already there"))
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
                    continue  # we stood still: others may think we died
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
            f"others have been bidding for it for {5 * dead_bid_s:.0f} s",
            f"when no run uses it, delete what is below {store.url}/{folder}",
        )
    )
