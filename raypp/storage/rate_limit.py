"""How fast a cable is written to: a token bucket that every upload of a process, and every copy, draws from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_SHORTEST_PIECE, _LONGEST_PIECE = 16 << 10, 256 << 10
_PIECE_S = 0.01
"""A piece is what the cap lets through in this time: whoever shares the cable waits for no more than one piece."""


@dataclass
class _Bucket:
    """What the writers under one cap share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0


class Abandoned(BaseException):
    """The writer was told to stop. Not an Exception: nobody may take it for a failure and try again."""


class Pace:
    """Lets so many bytes per second through, for all threads together, evenly.

    Args:
        bytes_per_s: The cap; 0 = none.
        stopped: Asked before each piece; True ends the upload with `Abandoned`.
    """

    def __init__(self, bytes_per_s: float = 0.0, stopped: Callable[[], bool] = lambda: False) -> None:
        self.bytes_per_s = bytes_per_s
        self._stopped = stopped
        self._bucket = _Bucket()

    def shared(self, stopped: Callable[[], bool]) -> Pace:
        """The same cap, together with this one, for a writer that is stopped in another way."""
        other = Pace(self.bytes_per_s, stopped)
        other._bucket = self._bucket
        return other

    @property
    def piece_bytes(self) -> int:
        """How much to send at once, between two calls of `take`."""
        if not self.bytes_per_s:
            return _LONGEST_PIECE
        return max(_SHORTEST_PIECE, min(_LONGEST_PIECE, int(self.bytes_per_s * _PIECE_S)))

    def take(self, size: int) -> None:
        """Waits until `size` bytes may go. Time in which nobody sent anything is not made up for.

        Raises:
            Abandoned: The upload is to stop.
        """
        if self._stopped():
            raise Abandoned
        if not self.bytes_per_s:
            return
        with self._bucket.lock:
            begin = max(self._bucket.free_at, time.monotonic())
            self._bucket.free_at = begin + size / self.bytes_per_s
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            if self._stopped():
                raise Abandoned
