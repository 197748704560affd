"""What a worker does whose controller does not come back: it waits for long, then saves, ends, and leaves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_INTERVAL_S = 5.0
_INTERVAL_S_PER_RANK = 0.03


def asks_every_s(ranks: int) -> float:
    """Seconds between two such questions of one process, in a run of so many ranks: all of them together cost the
    controller the same, however many they are."""
    return max(_INTERVAL_S, _INTERVAL_S_PER_RANK * ranks)


class Lifeline:
    """Asks now and then whether the controller is there.

    Args:
        answers: Asks it; raises when it does not answer. Also told of any other sign of it through `heard`.
        sign: When this process last heard of it in another way (`time.monotonic`), looked at before it is asked.
        patience_s: Silence after which the worker gives it up.
        given_up: Called once, in this object's thread.
        interval_s: Seconds between two questions, but never more than a quarter of `patience_s`.
    """

    def __init__(
        self,
        answers: Callable[[], None],
        patience_s: float,
        given_up: Callable[[], None],
        interval_s: float = _INTERVAL_S,
        sign: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._answers = answers
        self._patience_s = patience_s
        self._given_up = given_up
        self._sign = sign
        self._interval_s = min(interval_s, patience_s / 4)
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def heard(self, at: float) -> None:
        """The controller gave a sign of life then (`time.monotonic`)."""
        self._heard = max(self._heard, at)

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_s)
            now = time.monotonic()
            self.heard(self._sign())
            if now - self._heard < self._interval_s:
                continue
            try:
                self._answers()
            except Exception:  # noqa: BLE001  away for now, or gone: time tells
                if time.monotonic() - self._heard > self._patience_s:
                    self._given_up()
                    return
                continue
            self._heard = time.monotonic()
