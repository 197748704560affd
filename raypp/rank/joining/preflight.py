"""Tests the link between every two nodes before the ranks join, so that a wrong interface is named.

A process group that cannot connect hangs for minutes and then reports "timed out". Here each node's
first rank listens where its traffic goes and connects to every later node. Both directions carry
more bytes than a packet holds, which exposes a wrong MTU. No torch.
"""

import contextlib
import errno
import json
import logging
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge, Le, Len

from raypp.errors import Problem, UnreachableError
from raypp.rank.joining.network import Chosen, interface_to
from raypp.records import Seat
from raypp.retry import Backoff
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.sockets import KeyValueStore, Listener, UnprovenError, connect, receive

log = logging.getLogger(__name__)

_PAYLOAD = 256 * 1024
_MANY_NODES = 16
_SMALL_PAYLOAD = 16 * 1024
_HELLO = 96
_CONNECT_S = 10.0
_MEET_S = 300.0
"""Another node may still be importing torch. No answer at all fails after `2 · _CONNECT_S`."""
_PAYLOAD_S = 60.0
"""Longest time of a payload in one direction."""
_SHOWN_IN_FULL = 3
_CLOCK = struct.Struct("!d")
_SKEW_S = 2.0
"""Clocks that differ by more are worth a word."""
_STRANGER = "another process answers at this address"
_Text = Annotated[str, Len(0, 512)]
_PLACE_BOUNDS = Bounds(8192, 32)


@dataclass(frozen=True)
class LinkReport:
    """The link between two nodes, as measured by the node that connected. `node`, `peer`: the
    nodes' addresses as raypp knows them. `seconds`: round trip of one small message. `mbps`: rate
    of the transfer, both directions in turn; a rough number. `skew_s`: the peer's clock minus the
    node's, in seconds, accurate to half a round trip."""

    node: str
    peer: str
    interface: str
    seconds: float
    mbps: float
    skew_s: float = 0.0

    def __str__(self) -> str:
        rate = f"{self.mbps:.0f} Mbit/s" if self.mbps < 10_000 else f"{self.mbps / 1000:.0f} Gbit/s"
        return f"{self.node} – {self.peer} over {self.interface}: {self.seconds * 1e3:.2f} ms, about {rate}"


def wait_for_master(seat: Seat, chosen: Chosen, patience_s: float = _MEET_S) -> None:
    """Waits until rank 0's node answers at the rendezvous address. A refused connection means that
    the node is up and its rank 0 is not yet listening. Any other failure is one of the network.
    Raises UnreachableError: no answer in time; names the interface that was used."""
    end = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((seat.master_addr, seat.master_port), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            refused = error.errno == errno.ECONNREFUSED
            if time.monotonic() > end or (not refused and time.monotonic() > end - patience_s + 2 * _CONNECT_S):
                why = "nothing listens there" if refused else _reason(error)
                raise UnreachableError(
                    Problem(
                        "network",
                        f"{seat.node} cannot reach rank 0's node {seat.master_addr}, port {seat.master_port}, "
                        f"over {chosen.interface}: {why}",
                        "rank 0's process has ended; see its log"
                        if refused
                        else f"check the cable and the firewall between the two nodes (TCP, all ports), and "
                        f"`ip route get {seat.master_addr}`; `raypp doctor` tries every pair",
                    )
                ) from None
            time.sleep(0.05 if refused else 0.5)


@dataclass(frozen=True)
class Place:
    """Where a node listens, as it publishes it. `node`: its address as raypp knows it. `why`: of
    its interface. `identity`: what it answers with: run, attempt, the node's number."""

    node: _Text
    address: _Text
    port: Annotated[int, Ge(1), Le(65535)]
    interface: _Text
    why: _Text
    identity: _Text


def parse_place(data: bytes, key: str) -> Place:
    """Reads what a node published under a key. Raises UnreachableError: it is not such a place."""
    return parse_as(Place, data, key, _PLACE_BOUNDS, UnreachableError, "another program uses the rendezvous's port")


def check_links(
    seat: Seat,
    chosen: Chosen,
    store: KeyValueStore,
    patience_s: float = _MEET_S,
    tell: Callable[[str], None] = log.warning,
    clock: Callable[[], float] = time.time,
) -> list[LinkReport]:
    """Tests this node's links. Every node's first rank calls it once per attempt. Does nothing if
    there is only one node. `store`: the store the ranks meet at; uses the keys `preflight/N` and
    `preflight/N/done`. Returns the links to all nodes with a higher number. Raises
    UnreachableError: a link does not work; names the nodes, the interfaces and the fix."""
    count = len(dict.fromkeys(seat.nodes))
    if count < 2 or seat.local_rank != 0:
        return []
    identity = f"{seat.run}/{seat.attempt}/{seat.node_rank}"
    payload = _PAYLOAD if count <= _MANY_NODES else _SMALL_PAYLOAD
    answer = partial(_answer, identity=identity, payload=payload, clock=clock)
    address = chosen.interface.address
    with Listener(address, bytes.fromhex(seat.secret), answer, "preflight", tell) as listener:
        listening = Place(seat.node, address, listener.port, chosen.interface.name, chosen.why, identity)
        store.set(f"preflight/{seat.node_rank}", json.dumps(asdict(listening)))
        places = {node: _place(store, node, seat, patience_s) for node in range(count) if node != seat.node_rank}
        later = sorted(number for number in places if number > seat.node_rank)
        reports = [_measure(seat, chosen, places[number], payload, clock) for number in later]
        store.set(f"preflight/{seat.node_rank}/done", "")
        # Nodes with a lower number still have to connect to this listener.
        for number in sorted(set(places) - set(later)):
            _await(store, f"preflight/{number}/done", patience_s)
    return reports


def _place(store: KeyValueStore, number: int, seat: Seat, patience_s: float) -> Place:
    if not _await(store, f"preflight/{number}", patience_s):
        node = list(dict.fromkeys(seat.nodes))[number]
        fault = f"the ranks of node {node} did not reach the network check within {patience_s:.0f} s"
        fix = "see the log of the first rank there; `raypp doctor` tries every pair"
        raise UnreachableError(Problem("network", fault, fix))
    return parse_place(store.get(f"preflight/{number}"), f"preflight/{number}")


def _await(store: KeyValueStore, key: str, patience_s: float) -> bool:
    """Polls for a key, because the store's own wait may outlast its timeout by minutes."""
    return Backoff(patience_s, first_s=0.002, longest_s=0.1, factor=1.5).wait(lambda: store.check([key]))


def _measure(seat: Seat, chosen: Chosen, place: Place, payload: int, clock: Callable[[], float]) -> LinkReport:
    try:
        with connect(place.address, place.port, bytes.fromhex(seat.secret), timeout_s=_CONNECT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            start = time.perf_counter()
            link.sendall(_hello(place.identity))
            answer = receive(link, _HELLO, _CONNECT_S)
            seconds = time.perf_counter() - start
            if answer != _hello(place.identity):
                raise _link_error(seat, chosen, place, _STRANGER)
            skew_s = _CLOCK.unpack(receive(link, _CLOCK.size, _CONNECT_S))[0] - (clock() - seconds / 2)
            start = time.perf_counter()
            link.sendall(bytes(payload))
            receive(link, payload, _PAYLOAD_S)
            taken = max(1e-9, time.perf_counter() - start)
    except UnprovenError:
        raise _link_error(seat, chosen, place, _STRANGER) from None
    except OSError as error:
        raise _link_error(seat, chosen, place, _reason(error)) from None
    mbps = 2 * payload * 8 / taken / 1e6
    return LinkReport(seat.node, place.node, chosen.interface.name, seconds, mbps, skew_s)


def _link_error(seat: Seat, chosen: Chosen, place: Place, why: str) -> UnreachableError:
    """Returns an error that names both nodes, both interfaces and the right interface."""
    what = (
        f"{seat.node} (interface {chosen.interface.name}, {chosen.why}) cannot exchange data with {place.node} at "
        f"{place.address} (interface {place.interface} there, {place.why}): {why}"
    )
    fix = (
        "check cable, firewall (TCP, all ports between nodes) and MTU between the two; `raypp doctor` tries every pair"
    )
    with contextlib.suppress(UnreachableError):
        right = interface_to(place.node)
        if "named" in chosen.why or "named" in place.why:
            fix = (
                "remove GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME from resources.env, or name the interface of the "
                f"route between them: on {seat.node} that is {right.name} ({right.address}) to {place.node}"
            )
    return UnreachableError(Problem("resources.env" if "named" in chosen.why else "network", what, fix))


def links_in_words(chosen: Chosen, reports: Sequence[LinkReport]) -> str:
    """Describes a node's links in one line: up to three, else the slowest; and the worst clocks."""
    if len(reports) <= _SHOWN_IN_FULL:
        links = f"links {'; '.join(map(str, reports))}"
    else:
        links = f"{len(reports)} links work, the slowest: {min(reports, key=lambda report: report.mbps)}"
    worst = max(reports, key=lambda report: abs(report.skew_s))
    if abs(worst.skew_s) > _SKEW_S:
        side = "ahead of" if worst.skew_s > 0 else "behind"
        links += (
            f"; the clock of {worst.peer} is {abs(worst.skew_s):.1f} s {side} that of {worst.node}: run an NTP client "
            "on every node (stores refuse requests from a clock that is 15 minutes off)"
        )
    return f"interface {chosen.interface} ({chosen.why}); {links}"


def _answer(
    link: socket.socket, _number: int, identity: str, payload: int, clock: Callable[[], float] = time.time
) -> None:
    """Sends this node's identity and time to a node that connected, and echoes its payload."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    receive(link, _HELLO, _CONNECT_S)
    link.sendall(_hello(identity) + _CLOCK.pack(clock()))
    echo = receive(link, payload, _PAYLOAD_S)
    link.settimeout(_PAYLOAD_S)
    link.sendall(echo)


def _hello(identity: str) -> bytes:
    return identity.encode()[:_HELLO].ljust(_HELLO)


def _reason(error: OSError) -> str:
    return "no answer within 10 s" if isinstance(error, TimeoutError) else (error.strerror or str(error))
