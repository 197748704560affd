"""Uploads and copies: a rate limit for all of a process, and whether others' bytes come first."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SHORTEST_PIECE, _LONGEST_PIECE = 16 << 10, 256 << 10
_PIECE_S = 0.01
"""A piece is what the limit lets through in this time. Others that share the link wait for at most
one piece."""
YIELDED = 3.0
"""Longest time for which pieces give way, as a multiple of the time that they take at the limit: a
save takes at most 1 + YIELDED times as long as the limit alone makes it, whatever else is sent."""
_MOST_SAVED_S = 1.0
"""Time to give way that pieces may save up by not giving way."""
_LOOK_EVERY_S = 0.003


@dataclass
class _Bucket:
    """State that the writers under one limit share. `turn`: held by the writer whose piece is next.
    `free_at`: when the limit allows the next piece. `may_yield_s`: for how long pieces may still
    give way. `yielded_s`: for how long they have given way."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0
    may_yield_s: float = 0.0
    yielded_s: float = 0.0


class Abandoned(BaseException):
    """The writer must stop. Not an Exception, so that no handler retries it as a failure."""


class Pace:
    """Limits the bytes per second of all threads together, evenly, and lets other traffic pass.
    `bytes_per_s`: the limit; 0 for none, and then nothing gives way either. `stopped`: polled
    before each piece; True ends the upload with `Abandoned`. `gives_way`: returns whether traffic
    that goes first is under way; None: there is none. `sent`: bytes that were let through here,
    again after a failure: it grows while data flows."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
        gives_way: Callable[[], bool] | None = None,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._stopped = stopped
        self._gives_way = gives_way
        self._bucket = _Bucket()
        self.sent = 0

    def shared(self, stopped: Callable[[], bool]) -> Pace:
        """Returns an object under the same shared limit, with its own stop condition."""
        other = Pace(self.bytes_per_s, stopped, self._gives_way)
        other._bucket = self._bucket
        return other

    @property
    def piece_bytes(self) -> int:
        """How many bytes to send between two calls of `take`."""
        if not self.bytes_per_s:
            return _LONGEST_PIECE
        return max(_SHORTEST_PIECE, min(_LONGEST_PIECE, int(self.bytes_per_s * _PIECE_S)))

    @property
    def yielded_s(self) -> float:
        """Seconds for which pieces have given way, of all who share the limit."""
        return self._bucket.yielded_s

    def take(self, size: int) -> None:
        """Waits until `size` bytes may be sent; unused time is lost. Raises Abandoned: stop."""
        self._check()
        if self.bytes_per_s:
            self._wait(size)
        self.sent += size  # of several threads, one addition may be lost: it grows all the same

    def _wait(self, size: int) -> None:
        bucket, own_s = self._bucket, size / self.bytes_per_s
        # One at a time: pieces that have all waited for the same pause must not leave together.
        while not bucket.turn.acquire(timeout=0.5):
            self._check()
        try:
            begin = max(bucket.free_at, time.monotonic())
            while (left := begin - time.monotonic()) > 0:
                time.sleep(min(left, 0.5))
                self._check()
            bucket.may_yield_s = min(bucket.may_yield_s + YIELDED * own_s, max(_MOST_SAVED_S, YIELDED * own_s))
            if yielded := self._yield(bucket.may_yield_s):
                bucket.may_yield_s -= yielded
                bucket.yielded_s += yielded
                begin = time.monotonic()
            bucket.free_at = begin + own_s
        finally:
            bucket.turn.release()

    def _yield(self, longest_s: float) -> float:
        """Waits while other traffic is under way; returns for how long."""
        if self._gives_way is None or not self._gives_way():
            return 0.0
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < longest_s:
            time.sleep(min(_LOOK_EVERY_S, longest_s - waited))
            self._check()
            if not self._gives_way():
                break
        return time.monotonic() - begun

    def _check(self) -> None:
        if self._stopped():
            raise Abandoned


# Whether this process has bytes under way that matter more than those of an upload.
#
# Connections of uploads and copies carry a mark (`low_priority_options`). All others to other
# hosts are those of the training: gloo's, NCCL's over sockets, the rendezvous. The kernel knows
# how many bytes of a TCP connection have not been acknowledged, whoever wrote them, so neither
# torch nor the steps take part in this.
#
# What the runtime knows of its sends would not do: gloo's are complete when the kernel has their
# bytes. `sock_diag` would show other processes, too, but walks the kernel's whole table; TCP_INFO
# grew over the kernels. NCCL over RDMA bypasses the kernel and is not seen.

LOW_PRIORITY = 0x20
"""DSCP CS1 as a TOS byte: switches that honour it send this traffic last."""
_DSCP = 0xFC
_SIOCOUTQ = 0x5411
"""Linux's request for the bytes of a TCP socket that are not acknowledged yet."""
_LEAST_BYTES = 4 << 10
"""Heartbeats and sums of a few numbers are over before an upload could make room for them."""
_LIST_EVERY_S = 1.0
_FDS = Path("/proc/self/fd")


class OtherTraffic:
    """The unmarked connections of this process to other hosts. `is_here`: tells from a connection's
    own and its peer's host whether it stays inside a host and crosses no cable."""

    def __init__(self, is_here: Callable[[str, str], bool] | None = None) -> None:
        self._is_here = is_here or _same_host
        self._descriptors: list[int] = []
        self._listed_at = -_LIST_EVERY_S

    def is_under_way(self) -> bool:
        """Returns whether a connection has a message under way. False where nobody can tell."""
        now = time.monotonic()
        if now - self._listed_at >= _LIST_EVERY_S:
            self._descriptors, self._listed_at = self._list(), now
        return any(_unacknowledged(descriptor) >= _LEAST_BYTES for descriptor in self._descriptors)

    def _list(self) -> list[int]:
        return [int(entry.name) for entry in _FDS.iterdir() if self._counts(entry)] if _FDS.is_dir() else []

    def _counts(self, entry: Path) -> bool:
        with suppress(OSError):  # another thread may close it meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                return False
            # Not a duplicate, which would keep it open if its owner closes it now.
            connection = socket.socket(fileno=int(entry.name))
            try:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return False
                if connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & _DSCP == LOW_PRIORITY:
                    return False
                return not self._is_here(_host(connection.getsockname()), _host(connection.getpeername()))
            finally:
                connection.detach()
        return False


def _unacknowledged(descriptor: int) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, _SIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


def _host(address: Any) -> str:
    return str(address[0]).removeprefix("::ffff:")


def _same_host(own: str, peer: str) -> bool:
    return own == peer or peer == "::1" or peer.startswith("127.")
