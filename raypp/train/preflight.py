"""Tests the link between every two nodes before the ranks join, so that a wrong interface is named.

A process group that cannot connect hangs for minutes and then reports "timed out". Here the first
rank of each node listens on the interface its traffic takes, publishes the address, and connects to
every later node. Both directions carry more bytes than one packet holds, which also exposes a wrong
MTU. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypp.errors import Problem, UnreachableError
from raypp.records import Seat
from raypp.retry import Backoff
from raypp.train.network import Chosen, interface_to

_PAYLOAD = 256 * 1024
_MANY_NODES = 16
_SMALL_PAYLOAD = 16 * 1024
_HELLO = 96
_CONNECT_S = 10.0
_MEET_S = 300.0
"""Another node may still be importing torch. No answer at all fails after `2 · _CONNECT_S`."""
_SHOWN_IN_FULL = 3


class Rendezvous(Protocol):
    """The methods of torch's key-value store that this module uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class LinkReport:
    """The link between two nodes, as measured by the node that connected.

    Attributes:
        node, peer: The nodes' addresses as raypp knows them.
        interface: Name of the interface on `node`.
        seconds: Round trip of one small message.
        mbps: Rate of the transfer, both directions in turn; a rough number.
    """

    node: str
    peer: str
    interface: str
    seconds: float
    mbps: float

    def __str__(self) -> str:
        rate = f"{self.mbps:.0f} Mbit/s" if self.mbps < 10_000 else f"{self.mbps / 1000:.0f} Gbit/s"
        return f"{self.node} – {self.peer} over {self.interface}: {self.seconds * 1e3:.2f} ms, about {rate}"


def wait_for_master(seat: Seat, chosen: Chosen, patience_s: float = _MEET_S) -> None:
    """Waits until rank 0's node answers at the rendezvous address.

    A refused connection means that the node is up and its rank 0 is not yet listening. Any other
    failure is one of the network.

    Raises:
        UnreachableError: No answer in time; names the interface that was used.
    """
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


def check_links(seat: Seat, chosen: Chosen, store: Rendezvous, patience_s: float = _MEET_S) -> list[LinkReport]:
    """Tests this node's links. Every node's first rank calls it once per attempt.

    Does nothing if there is only one node.

    Args:
        seat: This rank's seat.
        chosen: The interface of this rank's traffic.
        store: The store the ranks meet at; uses the keys `preflight/N` and `preflight/N/done`.
        patience_s: How long to wait for the other nodes.

    Returns:
        The links to all nodes with a higher number.

    Raises:
        UnreachableError: A link does not work; names the nodes, the interfaces and the fix.
    """
    count = len(dict.fromkeys(seat.nodes))
    if count < 2 or seat.local_rank != 0:
        return []
    identity = f"{seat.run}/{seat.attempt}/{seat.node_rank}"
    payload = _PAYLOAD if count <= _MANY_NODES else _SMALL_PAYLOAD
    with _Listener(chosen.interface.address, identity, payload) as listener:
        mine = {
            "node": seat.node,
            "address": chosen.interface.address,
            "port": listener.port,
            "interface": chosen.interface.name,
            "why": chosen.why,
            "identity": identity,
        }
        store.set(f"preflight/{seat.node_rank}", json.dumps(mine))
        places = {
            number: _place(store, number, seat, patience_s) for number in range(count) if number != seat.node_rank
        }
        later = sorted(number for number in places if number > seat.node_rank)
        reports = [_measure(seat, chosen, places[number], payload) for number in later]
        store.set(f"preflight/{seat.node_rank}/done", "")
        # Nodes with a lower number still have to connect to this listener.
        for number in sorted(set(places) - set(later)):
            _await(store, f"preflight/{number}/done", patience_s)
    return reports


def _place(store: Rendezvous, number: int, seat: Seat, patience_s: float) -> dict[str, Any]:
    if not _await(store, f"preflight/{number}", patience_s):
        node = list(dict.fromkeys(seat.nodes))[number]
        raise UnreachableError(
            Problem(
                "network",
                f"the ranks of node {node} did not reach the network check within {patience_s:.0f} s",
                "see the log of the first rank there; `raypp doctor` tries every pair",
            )
        )
    return dict(json.loads(store.get(f"preflight/{number}")))


def _await(store: Rendezvous, key: str, patience_s: float) -> bool:
    """Polls for a key, because the store's own wait may outlast its timeout by minutes."""
    return Backoff(patience_s, first_s=0.002, longest_s=0.1, factor=1.5).wait(lambda: store.check([key]))


def _measure(seat: Seat, chosen: Chosen, place: dict[str, Any], payload: int) -> LinkReport:
    peer, address = str(place["node"]), str(place["address"])
    try:
        with socket.create_connection((address, int(place["port"])), timeout=_CONNECT_S) as link:
            link.settimeout(_CONNECT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            start = time.perf_counter()
            link.sendall(_hello(str(place["identity"])))
            answer = _receive(link, _HELLO)
            seconds = time.perf_counter() - start
            if answer != _hello(str(place["identity"])):
                raise _link_error(seat, chosen, place, "another process answers at this address")
            start = time.perf_counter()
            link.sendall(bytes(payload))
            _receive(link, payload)
            taken = max(1e-9, time.perf_counter() - start)
    except OSError as error:
        raise _link_error(seat, chosen, place, _reason(error)) from None
    return LinkReport(seat.node, peer, chosen.interface.name, seconds, 2 * payload * 8 / taken / 1e6)


def _link_error(seat: Seat, chosen: Chosen, place: dict[str, Any], why: str) -> UnreachableError:
    """Returns an error that names both nodes, both interfaces and the right interface."""
    peer, address = str(place["node"]), str(place["address"])
    what = (
        f"{seat.node} (interface {chosen.interface.name}, {chosen.why}) cannot exchange data with {peer} at {address} "
        f"(interface {place['interface']} there, {place['why']}): {why}"
    )
    fix = (
        "check cable, firewall (TCP, all ports between nodes) and MTU between the two; `raypp doctor` tries every pair"
    )
    with contextlib.suppress(UnreachableError):
        right = interface_to(peer)
        named = "named" in chosen.why or "named" in str(place["why"])
        if named:
            fix = (
                "remove GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME from resources.env, or name the interface of the "
                f"route between them: on {seat.node} that is {right.name} ({right.address}) to {peer}"
            )
    return UnreachableError(Problem("resources.env" if "named" in chosen.why else "network", what, fix))


def links_in_words(chosen: Chosen, reports: Sequence[LinkReport]) -> str:
    """Describes all links of a node in one line: up to three in full, else the slowest."""
    head = f"interface {chosen.interface} ({chosen.why})"
    if len(reports) <= _SHOWN_IN_FULL:
        return f"{head}; links {'; '.join(map(str, reports))}"
    slowest = min(reports, key=lambda report: report.mbps)
    return f"{head}; {len(reports)} links work, the slowest: {slowest}"


class _Listener:
    """Answers nodes that connect: sends its identity and echoes the payload."""

    def __init__(self, address: str, identity: str, payload: int) -> None:
        self._identity = identity
        self._payload = payload
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(256)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="raypp-preflight").start()

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        # close() alone leaves the thread blocked in accept().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link:
            link.settimeout(_CONNECT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _receive(link, _HELLO)
            link.sendall(_hello(self._identity))
            link.sendall(_receive(link, self._payload))


def _hello(identity: str) -> bytes:
    return identity.encode()[:_HELLO].ljust(_HELLO)


def _receive(link: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        part = link.recv(min(1 << 16, count - len(got)))
        if not part:
            raise ConnectionResetError("the connection was closed early")
        got += part
    return bytes(got)


def _reason(error: OSError) -> str:
    return "no answer within 10 s" if isinstance(error, TimeoutError) else (error.strerror or str(error))
