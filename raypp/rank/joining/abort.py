"""Unblocks a rank that waits for a peer, so that its process can join the next attempt.

`abort()` does not end a gloo operation that waits for a frozen or unreachable peer. Closing the
connection under it does. NCCL's abort ends its kernels; what they should have received is then
undefined (`parallel.rank_groups`).
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypp.stages.parallel.rank_groups import before_abort
from raypp.torch_private import backends_on

log = logging.getLogger(__name__)

_TIMEVAL = struct.Struct("ll")
_ABORT_S = 30.0
_aborting: list[threading.Thread] = []
_aborting_lock = threading.Lock()
_cut: dict[int, float] = {}
"""The time (`time.monotonic`) at which an attempt's connections were last cut, by its port."""


def cut_connections(master_port: int) -> int:
    """Closes every connection of this process's process groups and the attempt's key-value store.
    An operation that waits on one of them raises within milliseconds. May be called from any thread
    and any number of times. Connections to Ray, to an object store or to anything else stay open.
    `master_port`: of the attempt's seats. Returns the number of connections closed."""
    _cut[master_port] = time.monotonic()
    begin_abort()
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
    """Whether a socket belongs to a process group or to the attempt's key-value store. Only gloo
    sets a receive timeout on its connections (the group's timeout). The store is recognised by its
    port. Listening sockets are excluded: gloo ends the process if one of its own fails."""
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if any(_TIMEVAL.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size))):
        return True
    return bool(one.getpeername()[1] == master_port)


def begin_abort() -> list[threading.Thread]:
    """Begins to abort all process groups of this process; returns the threads that do it. Every
    group has a thread, so that all of them are told at once: an abort frees memory, which waits for
    the kernels of the groups that are not aborted yet (pytorch #119797). Calls of `_group_start`
    and `_group_end` around the aborts would not join them, because `abort` calls NCCL from a thread
    of its own. Does nothing while an earlier abort is under way."""
    with _aborting_lock:
        if any(thread.is_alive() for thread in _aborting):
            return list(_aborting)
        nccl = backends_on(torch.device("cuda")) if torch.cuda.is_available() and dist.is_initialized() else []
        if nccl:
            before_abort()
        gloo = backends_on(torch.device("cpu")) if dist.is_initialized() else []  # has little effect there
        _aborting[:] = [
            threading.Thread(target=_abort, args=(backend,), name="raypp-abort", daemon=True) for backend in nccl + gloo
        ]
        for thread in _aborting:
            thread.start()
        return list(_aborting)


def abort_groups() -> bool:
    """Aborts all groups of this process, so that nothing here waits for a peer. To be called first
    when a rank fails: until then, everything that waits for the device also waits for NCCL's
    kernels, whose peers may be gone. The groups must still be destroyed. Returns whether all are
    aborted: if not, a thread `raypp-abort` runs on, and the process cannot take another seat."""
    end = time.monotonic() + _ABORT_S
    threads = begin_abort()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        log.error("process groups were not aborted within %.0f s; this process cannot be used again", _ABORT_S)
        return False
    return True


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # noqa: BLE001 - the process is left to the caller's deadline
        log.warning("a process group was not aborted: %s", error)
