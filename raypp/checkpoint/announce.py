"""How ranks tell the committing one what they stored: keys in a store, never a collective.

A background save must not touch the training's process groups: a collective there would have to come in the
same order on every rank, and would wait behind the pipeline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_POLL_S = 0.02


class Announcements(Protocol):
    """Small messages between the ranks of one attempt, each under (step, rank)."""

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        """Says something once. Never waits for others."""
        ...

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, dict[str, Any]]:
        """What these ranks said of a step.

        Args:
            step: Which.
            ranks: Whose message is waited for.
            timeout_s: Longest wait.
            stopped: Asked now and then; True ends the wait.

        Raises:
            TimeoutError: Some said nothing in time (or `stopped`); the message names them.
        """
        ...


class StoreAnnouncements:
    """Over a TCPStore, by a connection of its own: a wait here blocks nobody who trains.

    Args:
        store: The attempt's TCPStore; only its address is used.
        attempt: Keeps the keys of two attempts apart.
    """

    def __init__(self, store: TCPStore, attempt: int) -> None:
        self._attempt = attempt
        self._store = TCPStore(
            store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        self._store.set(self._key(step, rank), json.dumps(message))

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        messages: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            key = self._key(step, rank)
            while not self._store.check([key]):
                if time.monotonic() > deadline or stopped():
                    silent = [other for other in ranks if not self._store.check([self._key(step, other)])]
                    raise TimeoutError(f"ranks {silent} did not say that their part of step {step} is stored")
                time.sleep(_POLL_S)
            messages[rank] = json.loads(self._store.get(key))
        return messages

    def _key(self, step: int, rank: int) -> str:
        return f"raypp-checkpoint/{self._attempt}/{step}/{rank}"
