"""Ends a process of a run that has lost its controller for too long, or whose actor has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from raypp.control.cleanup import exit_if_ended

_INTERVAL_S = 5.0
_ANSWER_S = 10.0
_INTERVAL_S_PER_RANK = 0.03


def ask_interval_s(ranks: int) -> float:
    """Returns the seconds between two checks of one process, so that all processes of a run
    together cost the controller the same whatever their number."""
    return max(_INTERVAL_S, _INTERVAL_S_PER_RANK * ranks)


class OrphanWatch:
    """Checks from a thread whether this actor still exists and the run's controller answers.
    `timeout_s`: silence after which the process counts as orphaned. `on_orphaned`: called once, in
    this object's thread. `interval_s`: seconds between two checks, at most a quarter of
    `timeout_s`."""

    def __init__(self, controller: Any, timeout_s: float, on_orphaned: Callable[[], None], interval_s: float) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._on_orphaned = on_orphaned
        self._interval_s = min(interval_s, timeout_s / 4)
        self._answered = time.monotonic()
        threading.Thread(target=self._watch, name="orphan-watch", daemon=True).start()

    def answered(self, at: float) -> None:
        """Records that the controller was heard from at that time (`time.monotonic`), which saves
        a check."""
        self._answered = max(self._answered, at)

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_s)
            with contextlib.suppress(Exception):  # Ray may not answer
                exit_if_ended()
            now = time.monotonic()
            if now - self._answered < self._interval_s:
                continue
            try:
                ray.get(self._controller.alive.remote(), timeout=_ANSWER_S)
            except Exception:  # noqa: BLE001  restarting, or gone for good: only time shows which
                if time.monotonic() - self._answered > self._timeout_s:
                    self._on_orphaned()
                    return
                continue
            self._answered = time.monotonic()
