"""Finds ports for servers that start some seconds later, and that nothing else takes meanwhile."""

import errno
import random
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LOWEST = 20_000
"""Ray's workers listen on 10002 to 19999."""
_TRIES = 50
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST_CLAIMS = 512
_claims: deque[socket.socket] = deque()
"""Names of ports that this process has chosen, newest last; the kernel frees them at its end."""


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def place_of(address: str, port: int) -> str:
    """Returns an address with a port as URLs write them: one of IPv6 is in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_towards(name: str) -> str:
    """Returns this machine's address on the way to another, of IPv4 if there is a choice. Raises
    OSError: the name has no address here, or there is no way."""
    found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, there = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns distinct ports of this host that are free and lie below the kernel's ephemeral range.

    The kernel may assign an ephemeral port to any outgoing connection before the server listens on
    it. If no such ports are below that range, or too few are free, the kernel chooses the rest.

    This function gives none of them to another process of this host while this process lives, or
    until it has chosen 512 others.
    """
    room, ports = _room(), list[int]()
    for port in random.SystemRandom().sample(room, k=min(_TRIES + count, len(room))):
        if len(ports) < count and port_is_free(port, host) and _claim(port):
            ports.append(port)
    return ports + _ephemeral_ports(count - len(ports), host)


def free_port(host: str = "127.0.0.1") -> int:
    """Returns one of `free_ports`."""
    return free_ports(1, host)[0]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Returns whether a server could listen on this port."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextmanager
def held_port(port: int, host: str = "127.0.0.1") -> Iterator[bool]:
    """Claims a port that the caller chose, until a server listens on it. Yields whether it is free,
    and no other process of this host has claimed it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with claim:
        yield _name(claim, port) and port_is_free(port, host)


def _claim(port: int) -> bool:
    """Claims the name of a port for a long time; False if another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if not _name(claim, port):
        claim.close()
        return False
    _claims.append(claim)
    if len(_claims) > _MOST_CLAIMS:
        _claims.popleft().close()
    return True


def _name(claim: socket.socket, port: int) -> bool:
    """Gives a socket the name of a port; False if another one has it. The name is an abstract Unix
    address: it belongs to one network namespace and is not a file."""
    try:
        claim.bind(f"\0raypp-port-{port}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # other systems have no such names
    return True


def _room() -> range:
    """Returns the ports above those of Ray's workers and below the kernel's ephemeral range."""
    try:
        end = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        end = 0
    return range(_LOWEST, max(_LOWEST, end))


def _ephemeral_ports(count: int, host: str) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family_of(host))) for _ in range(count)]
        for probe in probes:  # all are held until all are chosen, so that they are distinct
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
