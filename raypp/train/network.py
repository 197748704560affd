"""Which interface a rank's traffic takes, and how NCCL's sockets use it. No torch, no ray.

A machine with several networks carries Ray's address on one of them, and may reach its peers over another. The kernel
knows which: the interface is that of the route to a peer, unless the user has named one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from raypp.errors import Problem, UnreachableError
from raypp.records import Seat

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# What this process has set itself: a worker lives through several attempts, and may be seated elsewhere in a later one.
_OWN_MARK = "RAYPP_SET_NETWORK"


@dataclass(frozen=True)
class Interface:
    """An interface of this machine.

    Attributes:
        name: `eth0`.
        address: Its first IPv4 address (IPv6 when it has no other); empty when it has none.
        mbps: Its speed as the driver tells it, in Mbit/s; 0 when it does not.
        up: Whether it is up and has a carrier.
    """

    name: str
    address: str
    mbps: int
    up: bool

    def __str__(self) -> str:
        speed = f", {self.mbps / 1000:g} Gbit/s" if self.mbps else ""
        return f"{self.name} ({self.address or 'no address'}{speed}{'' if self.up else ', down'})"


@dataclass(frozen=True)
class Chosen:
    """The interface a rank uses, and why."""

    interface: Interface
    why: str


def interfaces() -> dict[str, Interface]:
    """Every interface of this machine, by name."""
    stats, found = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        by_family = {
            family: one.address.partition("%")[0]
            for family in (socket.AF_INET6, socket.AF_INET)
            for one in reversed(addresses)
            if one.family == family
        }
        address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, "")
        stat = stats.get(name)
        found[name] = Interface(name, address, max(0, stat.speed) if stat else 0, bool(stat and stat.isup))
    return found


def source_address(peer: str) -> str:
    """The address this machine's packets to a peer carry, by the kernel's routes. Nothing is sent.

    Raises:
        UnreachableError: There is no route.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnreachableError(
            Problem(
                "network",
                f"{socket.gethostname()} has no route to {peer}: {error}",
                "check `ip route get` there, the cable and the address",
            )
        ) from None


def interface_with(address: str) -> Interface:
    """The interface that has an address of this machine; for any loopback address the loopback's.

    Raises:
        UnreachableError: None has it.
    """
    known = interfaces()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            one = known[name]
            return Interface(name, address, one.mbps, one.up)
    if address.startswith("127."):
        for one in known.values():
            if one.address.startswith("127."):
                return one
    raise UnreachableError(f"no interface of {socket.gethostname()} has the address {address}: {sorted(known)}")


def interface_to(peer: str) -> Interface:
    """The interface of the route to a peer.

    Raises:
        UnreachableError: There is no route.
    """
    return interface_with(source_address(peer))


def choose_interface(seat: Seat, environment: MutableMapping[str, str] | None = None) -> Chosen:
    """The interface over which this rank meets the others: the user's, else that of the route to a peer.

    Args:
        seat: `nodes` tells the peers; the interface of Ray's address is used where there are none.

    Raises:
        UnreachableError: The user named an interface this machine has not, or there is no route.
    """
    environment = os.environ if environment is None else environment
    named = _users(environment, "GLOO_SOCKET_IFNAME") or _users(environment, "NCCL_SOCKET_IFNAME")
    if named:
        # NCCL takes lists and =/^ marks; only a plain name can be looked up.
        first = named.split(",")[0].lstrip("=")
        known = interfaces()
        match = known.get(first) or next((one for name, one in known.items() if name.startswith(first)), None)
        if named.startswith("^"):
            return _routed(seat, f", beside NCCL_SOCKET_IFNAME={named}")
        if match is None:
            what = f"{socket.gethostname()} has no interface {first!r} (named by the job's environment)"
            there = ", ".join(str(one) for one in known.values())
            raise UnreachableError(Problem("resources.env", what, f"there are: {there}"))
        return Chosen(match, "named by the job's environment")
    return _routed(seat, "")


def _routed(seat: Seat, addition: str) -> Chosen:
    others = [node for node in seat.nodes if node != seat.node]
    # Rank 0's node is where all meet; whoever is there looks towards the first of the others.
    peer = seat.master_addr if seat.master_addr != seat.node else (others[0] if others else "")
    if peer and others:
        return Chosen(interface_to(peer), f"on the route to {peer}{addition}")
    if seat.interface and seat.interface in (known := interfaces()):
        return Chosen(known[seat.interface], "it carries this node's address; there is no other node")
    return Chosen(interface_to(seat.master_addr), f"on the route to {seat.master_addr}")


def prepare_network(seat: Seat, environment: MutableMapping[str, str] | None = None) -> tuple[Chosen, list[str]]:
    """Sets the interface and NCCL's sockets in this process' environment; what the user has set stays.

    Called once per attempt, before the process group is made.

    Returns:
        The interface, and what was set and why, line by line, for the log.

    Raises:
        UnreachableError: See `choose_interface`.
    """
    environment = os.environ if environment is None else environment
    chosen = choose_interface(seat, environment)
    settings = dict.fromkeys(INTERFACE_VARIABLES, chosen.interface.name)
    told = [f"interface {chosen.interface}: {chosen.why}"]
    if seat.device == "cuda" and len(set(seat.nodes)) > 1 and not _has_infiniband():
        threads, sockets = nccl_sockets(chosen.interface.mbps)
        settings |= {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
        kept = [name for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD") if _users(environment, name)]
        mine = f"{threads} threads × {sockets} sockets for each connection"
        told.append(f"NCCL over Ethernet: {', '.join(kept)} as the user set" if kept else f"NCCL over Ethernet: {mine}")
    own = []
    for name, value in settings.items():
        if not _users(environment, name):
            environment[name] = value
            own.append(name)
    environment[_OWN_MARK] = ",".join(own)
    return chosen, told


def nccl_sockets(mbps: int) -> tuple[int, int]:
    """(threads, sockets per thread) with which NCCL fills a link: one connection fills 10 Gbit/s, none 100.

    NCCL's own default is 1 × 1 outside of the clouds it knows. Its documentation gives 4 × 4 for 100 Gbit/s. An
    interface that does not tell its speed is taken for a fast virtual one.
    """
    if 0 < mbps <= 10_000:
        return 1, 1
    return (4, 4) if mbps >= 100_000 else (2, 4)


def _users(environment: MutableMapping[str, str], name: str) -> str:
    """A variable's value, unless this process has set it itself."""
    return "" if name in environment.get(_OWN_MARK, "").split(",") else environment.get(name, "")


def _has_infiniband() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False
