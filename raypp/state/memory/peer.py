"""Keeps copies of snapshots on another node: who holds whose copy, and how it gets there.

Copies use TCP in threads of their own, never the training's groups. Both sides prove the attempt's
secret (`untrusted.sockets`); bytes and JSON are checked by CRC-32, not encrypted.
"""

import contextlib
import ipaddress
import json
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from raypp.crc32 import crc32
from raypp.errors import CheckpointError
from raypp.ports import address_towards
from raypp.retry import Backoff
from raypp.state.memory.files import CONTROL_BYTES, Control, decode_control, keeper
from raypp.state.memory.slot import Slot, checksum
from raypp.storage.rate_limit import LOW_PRIORITY, Abandoned, Pace
from raypp.untrusted.sockets import Listener, introduce, receive
from raypp.untrusted.text import visible

log = logging.getLogger(__name__)

_IO_S = 60.0
_CONNECT_S = 2.0
_RETRIES = Backoff(math.inf, first_s=0.2, longest_s=30.0, factor=5.0)
_REST = 3.0
"""Without a rate limit, the sender pauses for this many times the duration of each piece: a copy
takes a quarter of the link, and training traffic waits for one piece at most."""
_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 128 << 10
"""Send buffer of the socket: small compared with a piece, so that the measured duration of a piece
is that of the network, not of a copy into the buffer."""
_SLOWEST_BYTES_PER_S = 64 << 10
_LENGTH, _ANSWER = struct.Struct("<I"), struct.Struct("<Q?")
"""A copy begins with the length of its control block and ends with an answer: its step, and whether
it arrived whole."""

Place = Callable[[int, int], Slot]
"""(rank whose copy arrives, bytes) -> a slot that may be overwritten; raises OSError if there is no
room."""


def partner_of(rank: int, nodes: Sequence[int], sites: Sequence[int] = ()) -> int | None:
    """Returns the rank that holds the copy of a rank's snapshot; None on a single node. It is the
    rank with the same index on the next node, of the same site if that has another. `sites`: the
    site of every rank; (): all are at one."""
    order = sorted(set(nodes))
    if len(order) < 2:
        return None
    near = sorted({node for node, site in zip(nodes, sites, strict=True) if site == sites[rank]}) if sites else []
    order = near if len(near) > 1 else order
    following = order[(order.index(nodes[rank]) + 1) % len(order)]
    candidates = [other for other, node in enumerate(nodes) if node == following]
    index = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    return candidates[index % len(candidates)]


def own_address(address: str, master: str) -> str:
    """Returns an address of this node that the other nodes can reach. This is `address` if it is an
    IP address, else the local address of the route to `master`."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    return address_towards(master)


class CopyReceiver:
    """Receives copies of other ranks' snapshots."""

    def __init__(
        self, address: str, secret: bytes, world: int, place: Place, tell: Callable[[str], None] = log.warning
    ) -> None:
        self._world, self._place = world, place
        self._of: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._listener = Listener(address, secret, self._serve, "copies", tell)
        self.port = self._listener.port

    def close(self) -> None:
        """Closes all connections and ends the threads."""
        self._listener.close()

    def _serve(self, connection: socket.socket, owner: int) -> None:
        if owner >= self._world:
            raise ValueError(f"a peer says it is rank {owner} of {self._world}")
        with self._alone(owner, connection):
            while True:
                self._take(connection, owner)

    def _alone(self, owner: int, connection: socket.socket) -> threading.Lock:
        """Closes the rank's earlier connection, perhaps broken: two must not write one slot."""
        before, lock = self._of.get(owner, (None, threading.Lock()))
        self._of[owner] = (connection, lock)
        if before is not None:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        return lock

    def _take(self, connection: socket.socket, owner: int) -> None:
        """Receives one copy into its slot, checks it, seals it, and acknowledges it."""
        connection.settimeout(None)
        first = connection.recv(1)  # it may take long until the next snapshot arrives
        if not first:
            raise ConnectionResetError("the peer closed the connection")
        who = f"rank {owner}"
        (length,) = _LENGTH.unpack(first + receive(connection, _LENGTH.size - 1, _IO_S))
        if length > CONTROL_BYTES:
            raise CheckpointError(f"{who} announces a control block of {length} bytes")
        control = parse_control(receive(connection, length, _IO_S), who, rank=owner)
        tail = receive(connection, control["tail_size"], _IO_S + control["tail_size"] / _SLOWEST_BYTES_PER_S)
        control["keeper"] = keeper()
        slot = self._place(owner, control["data_size"])
        slot.begin(slot.name, control)
        data = slot.memory(control["data_size"]).numpy().data
        connection.settimeout(_IO_S)
        _receive_into(connection, data)
        fine = checksum(data, control) == control["data_crc"] and crc32(tail) == control["tail_crc"]
        if fine:
            slot.complete(control, tail)
        connection.sendall(_ANSWER.pack(control["step"], fine))


class CopySender:
    """Sends this rank's snapshots to its partner, one at a time, and retries after an error.
    `partner`: address and port of the partner's receiver."""

    def __init__(self, rank: int, partner: tuple[str, int], secret: bytes, pace: Pace | None = None) -> None:
        self._rank, self._partner, self._secret = rank, partner, secret
        self._pace = (pace or Pace()).shared(lambda: self._closed)
        self._wake = threading.Condition()
        self._slot: Slot | None = None
        self._closed = False
        self._socket: socket.socket | None = None
        self.arrived: int | None = None
        """The last step whose copy is complete at the partner."""
        self.error = ""
        self.failures = 0
        """Attempts since the last copy that arrived."""
        self._thread = threading.Thread(target=self._run, name="raypp-copy", daemon=True)
        self._thread.start()

    def offer(self, slot: Slot) -> None:
        """Sends `slot` next. It must not be written until `arrived` is its step."""
        with self._wake:
            self._slot = slot
            self._wake.notify()

    def close(self) -> bool:
        """Aborts the current copy; returns whether the thread has released its slot."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        connection = self._socket  # the thread may drop it meanwhile
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pauses = _RETRIES.pauses()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._slot is not None)
                slot, closed = self._slot, self._closed
            if closed or slot is None:
                self._drop()
                return
            try:
                step = self._send(slot)
            except Abandoned:
                continue
            except (OSError, ValueError) as error:
                self._drop()
                self.error = str(error)
                self._pause(next(pauses))
                self.failures += 1
                continue
            pauses = _RETRIES.pauses()
            self.failures, self.error = 0, ""
            with self._wake:
                if self._slot is slot:
                    self._slot = None
                self.arrived = step
                self._wake.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closed, timeout=seconds)

    def _send(self, slot: Slot) -> int:
        if (content := slot.read()) is None:
            raise ValueError("the snapshot to send is incomplete")
        control, tail = content
        if self._socket is None:
            self._socket = self._connect()
        step, text = int(control["step"]), json.dumps(control).encode()
        self._socket.sendall(_LENGTH.pack(len(text)) + text + tail)
        self._send_pieces(self._socket, slot.memory(control["data_size"]).numpy().data)
        answered, fine = _ANSWER.unpack(receive(self._socket, _ANSWER.size, _IO_S))
        if answered != step or not fine:
            raise ValueError(f"the copy of step {step} arrived damaged")
        return step

    def _send_pieces(self, connection: socket.socket, data: memoryview) -> None:
        """Raises Abandoned if the sender is closed meanwhile."""
        capped = self._pace.bytes_per_s > 0
        while data:
            piece = data[: self._pace.piece_bytes if capped else _PIECE_BYTES]
            self._pace.take(len(piece))
            started = time.monotonic()
            connection.sendall(piece)
            data = data[len(piece) :]
            if not capped and data:
                self._pause(_REST * (time.monotonic() - started))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._partner, timeout=_CONNECT_S)
        self._socket = connection  # from here on `close` can shut it down
        try:
            if self._closed:  # `close` has looked already
                raise Abandoned
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            introduce(connection, self._secret, self._rank)
            connection.settimeout(_IO_S)
        except BaseException:
            self._drop()
            raise
        return connection

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        view = view[count:]


def parse_control(text: bytes, who: str, **expected: int) -> dict[str, Any]:
    """Reads the control block of a complete snapshot, with these values. Raises CheckpointError: it
    is another one, or none; names the sender, `who`."""
    try:
        control = decode_control(text)
    except ValueError as error:
        raise CheckpointError(f"the control block from {who} {error}") from None
    if wrong := sorted(control.keys() ^ Control.__annotations__.keys()):
        unknown = "an unknown key" if wrong[0] in control else "no"
        raise CheckpointError(f"{who} sent a control block with {unknown} {visible(wrong[0])}")
    if not control["complete"]:
        raise CheckpointError(f"{who} sent the control block of an incomplete snapshot")
    for key, value in expected.items():
        if control[key] != value:
            raise CheckpointError(f"{who} sent a control block whose {key} is {control[key]}, not {value}")
    return control


def parse_facts(data: bytes, step: int, owner: int, who: str) -> tuple[dict[str, Any], bytes]:
    """Reads control block and tail of a snapshot that another node sends back: JSON, a line feed,
    the tail. Raises CheckpointError: they are torn, or of another snapshot."""
    text, _, tail = data.partition(b"\n")
    control = parse_control(text, who, rank=owner, step=step, tail_size=len(tail))
    if crc32(tail) != control["tail_crc"]:
        raise CheckpointError(f"the tail from {who} arrived damaged")
    return control, tail
