"""Ports to listen on some seconds from now, which nobody is given in the meantime."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 20_000
"""Ray's workers listen on 10002 to 19999."""
_TRIES = 50
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of this host that nothing listens on now, all different and below those that the kernel deals out.

    A port that the kernel chose may be dealt out again before its server listens, to any connection that anyone opens.
    Where the kernel leaves no such ports (or too few are free), the others are of its choice.
    """
    room = _room()
    tried = random.SystemRandom().sample(room, k=min(_TRIES + count, len(room)))
    found = [port for port in tried if port_is_free(port, host)][:count]
    return found + _dealt_out(count - len(found), host)


def free_port(host: str = "127.0.0.1") -> int:
    """One of `free_ports`."""
    return free_ports(1, host)[0]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _room() -> range:
    """The ports between Ray's and the kernel's."""
    try:
        end = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        end = 0
    return range(_LOWEST, max(_LOWEST, end))


def _dealt_out(count: int, host: str) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:  # all are held until all are chosen, so that they differ
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
