"""How ranks report to the committing rank what they stored: keys in a store, never a collective.

A background save must not use the process groups of the training: a collective there would have to
come in the same order on every rank, and would queue behind the pipeline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import NotRequired, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import TypedDict

from raypp.checkpoint.commit import ObjectRecord
from raypp.untrusted.documents import Bounds, Seconds, parse_as

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
    """

    object: ObjectRecord | None
    facts: Facts
    error: str
    committed: bool


def read_announcement(data: bytes, step: int, rank: int) -> Announcement:
    """Decodes a message.

    Raises:
        CheckpointError: It is not an announcement.
    """
    return parse_as(Announcement, data, f"rank {rank}'s message about step {step}", Bounds(1 << 20))


class Announcements(Protocol):
    """Small messages between the ranks of one attempt, each under (step, rank)."""

    def announce(self, step: int, rank: int, message: Announcement) -> None:
        """Publishes a message, once. Never waits for other ranks."""
        ...

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, Announcement]:
        """Waits for the messages of these ranks about a step.

        Args:
            step: The step.
            ranks: Ranks whose messages to wait for.
            timeout_s: Longest wait.
            stopped: Polled during the wait; True ends it.

        Raises:
            TimeoutError: Some ranks sent nothing in time, or `stopped`; the message names them.
            CheckpointError: A message is not an announcement.
        """
        ...


class StoreAnnouncements:
    """Announcements over a TCPStore, by a separate connection: a wait here blocks no training.

    Args:
        store: The attempt's TCPStore; only its address is used.
        attempt: Part of the keys, so that attempts do not read each other's messages.
    """

    def __init__(self, store: TCPStore, attempt: int) -> None:
        self._attempt = attempt
        self._store = TCPStore(
            store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def announce(self, step: int, rank: int, message: Announcement) -> None:
        self._store.set(self._key(step, rank), json.dumps(message, default=asdict))

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, Announcement]:
        deadline = time.monotonic() + timeout_s
        messages: dict[int, Announcement] = {}
        for rank in ranks:
            key = self._key(step, rank)
            while not self._store.check([key]):
                if time.monotonic() > deadline or stopped():
                    silent = [other for other in ranks if not self._store.check([self._key(step, other)])]
                    if not silent:
                        continue  # the last one has just reported
                    raise TimeoutError(
                        f"ranks {silent} did not report in time that their part of step {step} is stored"
                    )
                time.sleep(_POLL_S)
            messages[rank] = read_announcement(self._store.get(key), step, rank)
        return messages

    def _key(self, step: int, rank: int) -> str:
        return f"raypp-checkpoint/{self._attempt}/{step}/{rank}"
