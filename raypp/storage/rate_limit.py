"""A rate limit: a token bucket shared by all uploads and copies of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_SHORTEST_PIECE, _LONGEST_PIECE = 16 << 10, 256 << 10
_PIECE_S = 0.01
"""A piece is what the limit lets through in this time. Others that share the link wait for at most
one piece."""


@dataclass
class _Bucket:
    """State that the writers under one limit share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0


class Abandoned(BaseException):
    """The writer must stop. Not an Exception, so that no handler retries it as a failure."""


class Pace:
    """Limits the bytes per second of all threads together, evenly.

    Args:
        bytes_per_s: The limit; 0 for none.
        stopped: Polled before each piece; True ends the upload with `Abandoned`.
    """

    def __init__(self, bytes_per_s: float = 0.0, stopped: Callable[[], bool] = lambda: False) -> None:
        self.bytes_per_s = bytes_per_s
        self._stopped = stopped
        self._bucket = _Bucket()

    def shared(self, stopped: Callable[[], bool]) -> Pace:
        """Returns an object under the same shared limit, with its own stop condition."""
        other = Pace(self.bytes_per_s, stopped)
        other._bucket = self._bucket
        return other

    @property
    def piece_bytes(self) -> int:
        """How many bytes to send between two calls of `take`."""
        if not self.bytes_per_s:
            return _LONGEST_PIECE
        return max(_SHORTEST_PIECE, min(_LONGEST_PIECE, int(self.bytes_per_s * _PIECE_S)))

    def take(self, size: int) -> None:
        """Waits until `size` bytes may be sent. Unused time does not accumulate.

        Raises:
            Abandoned: The upload must stop.
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
