"""Whether this process has bytes under way that matter more than those of an upload.

Connections of uploads and copies carry a mark (`low_priority_options`). All others to other hosts
are those of the training: gloo's, NCCL's over sockets, the rendezvous. The kernel knows how many
bytes of a TCP connection have not been acknowledged, whoever wrote them, so neither torch nor the
steps take part in this.

What the runtime knows of its sends would not do: gloo's are complete when the kernel has their
bytes. `sock_diag` would show other processes, too, but walks the kernel's whole table; TCP_INFO
grew over the kernels. NCCL over RDMA bypasses the kernel and is not seen.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    """The unmarked connections of this process to other hosts.

    Args:
        is_here: Tells from a connection's own and its peer's host whether they are the same host.
            What stays inside a host crosses no cable.
    """

    def __init__(self, is_here: Callable[[str, str], bool] | None = None) -> None:
        self._is_here = is_here or _same_host
        self._found: list[int] = []
        self._listed_at = -_LIST_EVERY_S

    def is_under_way(self) -> bool:
        """Returns whether a connection has a message under way. False where nobody can tell."""
        now = time.monotonic()
        if now - self._listed_at >= _LIST_EVERY_S:
            self._found, self._listed_at = self._list(), now
        return any(_unacknowledged(descriptor) >= _LEAST_BYTES for descriptor in self._found)

    def _list(self) -> list[int]:
        if not _FDS.is_dir():
            return []
        return [int(entry.name) for entry in _FDS.iterdir() if self._counts(entry)]

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
