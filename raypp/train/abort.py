"""Unblocks a rank that waits for a peer, so that its process can join the next attempt.

`abort()` does not end a gloo operation that waits for a frozen or unreachable peer. Closing the
connection under it does. NCCL has its own abort.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist

from raypp.torch_private import backends_on

log = logging.getLogger(__name__)

_TIMEVAL = struct.Struct("ll")
_cut: dict[int, float] = {}
"""When the connections of an attempt were last cut, in `time.monotonic`, by the attempt's port."""


def cut_connections(master_port: int) -> int:
    """Closes every connection of this process's process groups and the attempt's key-value store.

    An operation that waits on one of them raises within milliseconds. May be called from any thread
    and any number of times. Connections to Ray, to an object store or to anything else stay open.

    Args:
        master_port: `Seat.master_port` of the attempt to abort.

    Returns:
        The number of connections closed.
    """
    _cut[master_port] = time.monotonic()
    _abort_nccl()
    ended = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # descriptors open and close during the iteration
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
            with socket.socket(fileno=copy) as one:
                if _is_of_a_group(one, master_port):
                    one.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def cut_since(master_port: int, moment: float) -> bool:
    """Whether `cut_connections` was called for this port since `moment`; if so, joins give up."""
    return _cut.get(master_port, 0.0) > moment


def _is_of_a_group(one: socket.socket, master_port: int) -> bool:
    """Whether a socket belongs to a process group or to the attempt's key-value store.

    Only gloo sets a receive timeout on its connections (the group's timeout). The store is
    recognised by its port. Listening sockets are excluded: gloo ends the process if one of its own
    fails.
    """
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if any(_TIMEVAL.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size))):
        return True
    return bool(one.getpeername()[1] == master_port)


def _abort_nccl() -> None:
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_initialized()):
        return
    for backend in backends_on(torch.device("cuda")):
        with contextlib.suppress(Exception):
            backend.abort()
