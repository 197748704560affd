"""Chooses the network interface of a rank's traffic and NCCL's sockets. No torch, no ray.

The kernel's routes decide, unless the user names an interface: Ray may use another network.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from raypp.errors import Problem, UnreachableError
from raypp.records import Seat

# The variables this process set itself: a later attempt may seat a worker elsewhere.
_OWN_MARK = "RAYPP_SET_NETWORK"
_HCAS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine. `address`: the first IPv4 address (IPv6 if there is
    none); empty if it has no address. `mbps`: speed in Mbit/s as the driver reports it; 0 if it
    reports none. `up`: whether the interface is up and has a carrier."""

    name: str
    address: str
    mbps: int
    up: bool

    def __str__(self) -> str:
        speed = f", {self.mbps / 1000:g} Gbit/s" if self.mbps else ""
        return f"{self.name} ({self.address or 'no address'}{speed}{'' if self.up else ', down'})"


@dataclass(frozen=True)
class Chosen:
    """The interface a rank uses, and the reason."""

    interface: Interface
    why: str


def interfaces() -> dict[str, Interface]:
    """Returns every interface of this machine, by name."""
    stats, by_name = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        by_family = {
            family: one.address.partition("%")[0]
            for family in (socket.AF_INET6, socket.AF_INET)
            for one in reversed(addresses)
            if one.family == family
        }
        address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, "")
        stat = stats.get(name)
        by_name[name] = Interface(name, address, max(0, stat.speed) if stat else 0, bool(stat and stat.isup))
    return by_name


def source_address(peer: str) -> str:
    """Returns the source address of this machine's packets to `peer`, by the kernel's routes. Sends
    nothing. Raises UnreachableError: there is no route."""
    try:
        family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        fault = f"{socket.gethostname()} has no route to {peer}: {error}"
        fix = "check `ip route get` there, the cable and the address"
        raise UnreachableError(Problem("network", fault, fix)) from None


def interface_with(address: str) -> Interface:
    """Returns the interface that has an address; for any loopback address, the loopback interface.
    Raises UnreachableError: no interface of this machine has the address."""
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
    """Returns the interface of the route to a peer; raises an UnreachableError without one."""
    return interface_with(source_address(peer))


def choose_interface(seat: Seat, environment: MutableMapping[str, str] = os.environ) -> Chosen:
    """Returns the interface for this rank's traffic: the user's, else that of the route to a peer.
    `seat`: `nodes` names the peers; without peers the interface of Ray's address is used. Raises
    UnreachableError: this machine lacks the interface the user named, or there is no route."""
    gloo, nccl = (_users(environment, name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    named = gloo or nccl
    if named:
        # NCCL accepts lists, prefixes, and the marks = (no prefixes) and ^; gloo accepts names.
        first = named.split(",")[0].lstrip("=")
        known = interfaces()
        match = known.get(first)
        if match is None and not gloo and not nccl.startswith("="):
            match = next((one for name, one in known.items() if name.startswith(first)), None)
        if named.startswith("^"):
            return _routed(seat, f", with NCCL_SOCKET_IFNAME={named}")
        if match is None:
            what = f"{socket.gethostname()} has no interface {first!r} (named by the job's environment)"
            there = ", ".join(str(one) for one in known.values())
            raise UnreachableError(Problem("resources.env", what, f"use one of: {there}"))
        return Chosen(match, "named by the job's environment")
    return _routed(seat, "")


def _routed(seat: Seat, addition: str) -> Chosen:
    others = [node for node in seat.nodes if node != seat.node]
    # All ranks meet at rank 0's node; ranks on that node take the route to the first other node.
    peer = seat.master_addr if seat.master_addr != seat.node else (others[0] if others else "")
    if peer and others:
        return Chosen(interface_to(peer), f"on the route to {peer}{addition}")
    if seat.interface and seat.interface in (known := interfaces()):
        return Chosen(known[seat.interface], "it carries this node's address; there is no other node")
    chosen = Chosen(interface_to(seat.master_addr), f"on the route to {seat.master_addr}")
    # Who names loopback itself tries several nodes on one machine; a host name is meant for others.
    is_loopback = seat.master_addr == "localhost" or seat.master_addr.startswith(("127.", "::1"))
    if _has_other_nodes(seat) and not is_loopback and chosen.interface.address.startswith("127."):
        what = f"{seat.master_addr} is {chosen.interface.address} on {seat.node}, which no other node can reach"
        fix = "give torchrun an IP address (--local-addr, --master-addr), or set GLOO_SOCKET_IFNAME"
        raise UnreachableError(Problem("network", what, fix))
    return chosen


def _has_other_nodes(seat: Seat) -> bool:
    """Under torchrun no rank knows the others' nodes."""
    return len(set(seat.nodes)) > 1 if seat.nodes else seat.local_world_size < seat.world_size


def prepare_network(seat: Seat, environment: MutableMapping[str, str] = os.environ) -> tuple[Chosen, list[str]]:
    """Sets the interface and NCCL's socket variables; keeps the user's. Called once per attempt,
    before the process group. Returns the interface, and log lines on it."""
    chosen = choose_interface(seat, environment)
    name = chosen.interface.name
    # NCCL takes a plain name for a prefix: eth1 would also mean eth10.
    settings = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    lines = [f"interface {chosen.interface}: {chosen.why}"]
    if seat.device == "cuda" and _has_other_nodes(seat) and not _has_infiniband():
        threads, sockets = nccl_sockets(chosen.interface.mbps)
        settings |= {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
        kept = [name for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD") if _users(environment, name)]
        sockets_text = f"{threads} threads × {sockets} sockets per connection"
        choice = f"{', '.join(kept)} as the user set" if kept else sockets_text
        lines.append(f"NCCL over Ethernet: {choice}")
    own = []
    for name, value in settings.items():
        if not _users(environment, name):
            environment[name] = value
            own.append(name)
    environment[_OWN_MARK] = ",".join(own)
    return chosen, lines


def nccl_sockets(mbps: int) -> tuple[int, int]:
    """Returns (threads, sockets per thread) for NCCL to fill a link. One TCP connection fills 10
    Gbit/s but not 100. NCCL's default is 1 × 1 outside of the clouds it knows; it recommends 4 × 4
    for 100 Gbit/s. An interface that reports no speed is taken for a fast virtual one."""
    if 0 < mbps <= 10_000:
        return 1, 1
    return (4, 4) if mbps >= 100_000 else (2, 4)


def network_gbps(mbps: int, environment: Mapping[str, str] = os.environ, devices: Path = _HCAS) -> float:
    """Returns the Gbit/s of one connection of NCCL's to another node; 0: not reported.

    That of the fastest port of an HCA that is active, which NCCL prefers, else the interface's.
    `mbps`: of the interface. `environment`: with NCCL's settings. `devices`: the folder of sysfs
    that has one for each HCA."""
    rates = []
    if environment.get("NCCL_IB_DISABLE", "0") == "0" and environment.get("NCCL_NET", "IB").lower() != "socket":
        for port in devices.glob("*/ports/*"):
            with suppress(OSError):
                rate = re.match(r"[\d.]+", (port / "rate").read_text())
                if rate and "ACTIVE" in (port / "state").read_text():
                    rates.append(float(rate[0]))
    return max(rates, default=mbps / 1000)


def _users(environment: MutableMapping[str, str], name: str) -> str:
    """Returns a variable's value, or "" if this process set it itself."""
    return "" if name in environment.get(_OWN_MARK, "").split(",") else environment.get(name, "")


def _has_infiniband() -> bool:
    """Whether a port of an HCA is active, which NCCL then takes."""
    try:
        return any("ACTIVE" in port.read_text() for port in _HCAS.glob("*/ports/*/state"))
    except OSError:
        return False
