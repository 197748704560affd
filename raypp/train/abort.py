"""Making a rank come free that waits for a peer: its process goes on to the next attempt, its groups do not.

A gloo operation that waits for a frozen or unreachable peer is not ended by `abort()`; it is by closing the
connection under it. NCCL has an abort of its own.
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
"""When the connections of an attempt, known by its port, were last cut; by `time.monotonic`."""


def cut_connections(master_port: int) -> int:
    """Ends every connection of this process' process groups, and its own to the attempt's key-value store.

    Whatever waits on one of them raises within milliseconds. May be called from any thread, again and again;
    connections to Ray, to an object store or to anything else are left alone.

    Args:
        master_port: `Seat.master_port` of the attempt that is left.

    Returns:
        How many connections were ended.
    """
    _cut[master_port] = time.monotonic()
    _abort_nccl()
    ended = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # descriptors come and go while this reads
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
            with socket.socket(fileno=copy) as one:
                if _is_of_a_group(one, master_port):
                    one.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def cut_since(master_port: int, moment: float) -> bool:
    """Whether the attempt of that port is being left, since a moment of `time.monotonic`: nobody need go on joining."""
    return _cut.get(master_port, 0.0) > moment


def _is_of_a_group(one: socket.socket, master_port: int) -> bool:
    """Gloo alone sets a receive timeout on its connections (the group's); the store is known by its port.

    Listening sockets are none of them: gloo ends the process when one of its own fails.
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
