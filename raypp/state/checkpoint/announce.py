"""How ranks report to the committing rank what they stored: keys in a store, never a collective.

A background save must not use the process groups of the training: a collective there would have to
come in the same order on every rank, and would queue behind the pipeline.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import NotRequired

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import TypedDict

from raypp.state.checkpoint.commit import ObjectRecord
from raypp.untrusted.documents import Bounds, Seconds, parse_as
from raypp.untrusted.sockets import SignedKeys

log = logging.getLogger(__name__)

TELLS_PER_TIMEOUT = 20
"""How often a rank tells its progress, and others look, in the time for which they wait for it."""
_POLL_S = 0.02


class Facts(TypedDict):
    """Seconds of a save on one rank; `yielded_s` are part of `upload_s`."""

    stall_s: Seconds
    upload_s: Seconds
    yielded_s: NotRequired[Seconds]


class Announcement(TypedDict, total=False):
    """What a rank, or the committing rank about the commit, says about a step.

    Attributes:
        object: The object that the rank stored; None if other ranks hold all of its state.
        facts: How long it took.
        error: Why it could not store its part, instead of the other two; or why there is no commit.
        committed: Whether the commit succeeded.
        void: The save failed before COMMIT was written for the first time, so none can appear.
    """

    object: ObjectRecord | None
    facts: Facts
    error: str
    committed: bool
    void: bool


def read_announcement(data: bytes, step: int, rank: int) -> Announcement:
    """Decodes a message. Raises CheckpointError: it is not an announcement."""
    return parse_as(Announcement, data, f"rank {rank}'s message about step {step}", Bounds(1 << 20))


class Announcements:
    """Small messages between the ranks of one attempt, each under (step, rank).

    They go over a separate connection to a TCPStore: a wait here blocks no training. `store`: the
    attempt's TCPStore; only its address is used. `attempt`: part of the keys, so that attempts do
    not read each other's messages. `secret`: the attempt's, in hex digits: messages of others count
    as failures."""

    def __init__(self, store: TCPStore, attempt: int, secret: str = "") -> None:
        self._attempt = attempt
        self._store = TCPStore(
            store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._signed = SignedKeys(self._store, secret)

    def announce(self, step: int, rank: int, message: Announcement) -> None:
        """Publishes a message, once. Never waits for other ranks."""
        self._signed.set(self._key(step, rank), json.dumps(message, default=asdict))

    def progress(self, step: int, rank: int, value: int) -> None:
        """Publishes that a rank still works on its message: it does while the value changes."""
        self._signed.set(self._progress_key(step, rank), str(value))

    @contextmanager
    def telling(self, step: int, rank: int, value: Callable[[], int], every_s: float) -> Iterator[None]:
        """Publishes progress from time to time, in a thread of its own."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(every_s):
                try:
                    self.progress(step, rank, value())
                except Exception as error:  # noqa: BLE001 - the message itself fails as well, and is reported
                    log.debug("cannot announce progress of step %d: %s", step, error)
                    return

        thread = threading.Thread(target=tell, name="raypp-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait_all(
        self,
        step: int,
        ranks: Sequence[int],
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
        progressed: Callable[[], None] = lambda: None,
    ) -> dict[int, Announcement]:
        """Waits for the messages of these ranks about a step. `timeout_s`: longest wait for a rank
        that makes no progress. `stopped`: polled during the wait; True ends it. `progressed`:
        called when one of them has made progress. Raises TimeoutError: some ranks sent nothing, and
        no progress, in time, or `stopped`; the message names them; CheckpointError: a message is
        not an announcement."""
        begun = looked = time.monotonic()
        messages: dict[int, Announcement] = {}
        heard: dict[int, tuple[bytes, float]] = {}
        for rank in ranks:
            key = self._key(step, rank)
            while not self._store.check([key]):
                now = time.monotonic()
                if stopped() or now - looked > timeout_s / TELLS_PER_TIMEOUT:
                    silent = [other for other in ranks if not self._store.check([self._key(step, other)])]
                    if self._look(step, silent, heard):
                        progressed()
                    late = [other for other in silent if now - heard.get(other, (b"", begun))[1] > timeout_s]
                    if late or (silent and stopped()):
                        raise TimeoutError(
                            f"ranks {late or silent} did not report in time that their part of step {step} is stored"
                        )
                    looked = now
                time.sleep(_POLL_S)
            messages[rank] = read_announcement(self._signed.get(key), step, rank)
        return messages

    def forget(self, step: int, ranks: Sequence[int]) -> None:
        """Removes what ranks have said about a step: nobody will wait for it any more."""
        for rank in ranks:
            for key in (self._key(step, rank), self._progress_key(step, rank)):
                self._store.delete_key(key)

    def _look(self, step: int, ranks: Sequence[int], heard: dict[int, tuple[bytes, float]]) -> bool:
        """Notes when each rank's progress last changed; returns whether one has changed now."""
        changed = False
        for rank in ranks:
            key = self._progress_key(step, rank)
            value = self._signed.get(key) if self._store.check([key]) else b""
            if value != heard.get(rank, (b"", 0.0))[0]:
                heard[rank], changed = (value, time.monotonic()), True
        return changed

    def _key(self, step: int, rank: int) -> str:
        return f"raypp-checkpoint/{self._attempt}/{step}/{rank}"

    def _progress_key(self, step: int, rank: int) -> str:
        return f"{self._key(step, rank)}/progress"
