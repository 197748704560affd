"""Connections between processes of raypp: each side first proves that it knows a secret. The proofs
are HMAC-SHA-256 over random numbers of both sides. Until then a peer gets no thread, 80 bytes of
memory and a few seconds. What follows is not encrypted.

Values in torch's key-value store, open to all who reach its port, are signed with such a secret."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from raypp.errors import Problem, RayppError, UnreachableError

log = logging.getLogger(__name__)

PROOF_S = 5.0
"""Longest time from a connection to its proof."""
MOST_UNPROVEN = 64
"""Connections without a proof at the same time. One more ends the oldest: a peer that knows the
secret needs milliseconds."""
_MAGIC = b"RAYPP-2\n"
_RANDOM = 32
_PROOF = 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}sQ{_RANDOM}s{_PROOF}s")
"""magic, number, random bytes, proof"""
GREETING_BYTES = _HELLO.size
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_JOIN_S = 5.0
_PIECE = 1 << 16


class UnprovenError(ConnectionError):
    """The two sides do not have the same secret."""


@dataclass(eq=False)
class _Unproven:
    """A connection whose peer has not proved anything."""

    connection: socket.socket
    address: str
    until: float
    random: bytes = field(default_factory=lambda: secrets.token_bytes(_RANDOM))
    heard: bytes = b""


class Listener:
    """Listens on one address of this machine and serves the peers that know the secret. `serve`:
    called in a thread of its own with each proven connection, which blocks, and the number that the
    peer sent. The connection is closed afterwards. OSError, ValueError and RayppError end the
    connection only. `purpose`: what the port is for, in messages and as part of the threads' names.
    `tell`: called once, from another thread, with the address and the fault of the first connection
    that was refused. Raises OSError: the address is not one of this machine; ValueError: the secret
    is empty."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        serve: Callable[[socket.socket, int], None],
        purpose: str,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        if not secret:
            raise ValueError("a listener needs a secret")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Not in its own thread, which could not report that this process has no descriptors left.
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((address, 0), family=family, backlog=256)
        self._server.setblocking(False)
        self._secret, self._serve, self._purpose, self._tell = secret, serve, purpose, tell
        self._closed = self._reported = False
        self._unproven: dict[socket.socket, _Unproven] = {}  # oldest first
        self._proven: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.port = int(self._server.getsockname()[1])
        self.refused = 0
        """Connections that proved nothing: strangers, and peers that died meanwhile."""
        self._start(self._listen)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections and ends the threads. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        for connection in list(self._proven):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"raypp-{self._purpose}", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    # The thread that listens ----------------------------------------------------------------------

    def _listen(self) -> None:
        with self._selector as selector, self._server:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._closed:
                oldest = next(iter(self._unproven.values()), None)
                wait_s = None if oldest is None else max(0.0, oldest.until - time.monotonic())
                for key, _ in selector.select(wait_s):
                    if key.data is None:
                        self._accept(selector)
                    elif key.data.connection in self._unproven:  # not ended by `_accept` meanwhile
                        self._hear(selector, key.data)
                now = time.monotonic()
                for one in [one for one in self._unproven.values() if one.until <= now]:
                    self._refuse(selector, one, f"it proved nothing within {PROOF_S:.0f} s")
            for one in list(self._unproven.values()):
                self._forget(selector, one).close()
        if self.refused:
            log.info("the port for %s refused %d connections", self._purpose, self.refused)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        oldest = next(iter(self._unproven.values()), None)
        try:
            connection, address = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closed:  # this process may have no descriptors left
                if oldest is not None:
                    self._refuse(selector, oldest, f"no further connection can be accepted ({error.strerror})")
                time.sleep(_PAUSE_S)
            return
        if oldest is not None and len(self._unproven) >= MOST_UNPROVEN:
            self._refuse(selector, oldest, f"{MOST_UNPROVEN} others wait without a proof")
        connection.setblocking(False)
        one = _Unproven(connection, str(address[0]), time.monotonic() + PROOF_S)
        self._unproven[connection] = one
        selector.register(connection, selectors.EVENT_READ, one)
        try:
            connection.sendall(one.random)
        except OSError:
            self._refuse(selector, one, "")

    def _hear(self, selector: selectors.BaseSelector, one: _Unproven) -> None:
        try:
            part = one.connection.recv(GREETING_BYTES - len(one.heard))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        one.heard += part
        if not part:
            self._refuse(selector, one, "")
        elif not greeting_fits(one.heard):
            self._refuse(selector, one, "it does not speak raypp's protocol")
        elif len(one.heard) == GREETING_BYTES:
            number, theirs, fits = checked_greeting(one.heard, self._secret, one.random)
            if fits:
                self._welcome(selector, one, number, theirs)
            else:
                with contextlib.suppress(OSError):
                    one.connection.send(bytes(_PROOF))  # no proof: the peer learns why at once
                self._refuse(selector, one, "it does not know the secret")

    def _welcome(self, selector: selectors.BaseSelector, one: _Unproven, number: int, theirs: bytes) -> None:
        connection = self._forget(selector, one)
        self._proven.add(connection)
        connection.setblocking(True)
        self._start(self._serve_peer, connection, number, _proof(self._secret, b"listener", one.random, theirs, number))

    def _refuse(self, selector: selectors.BaseSelector, one: _Unproven, why: str) -> None:
        """Ends a connection. Without `why` it is not reported: the peer may have died."""
        self._forget(selector, one).close()
        self.refused += 1
        if why and not self._reported:
            self._reported = True
            self._tell(f"a connection from {one.address} to the port for {self._purpose} was refused: {why}")

    def _forget(self, selector: selectors.BaseSelector, one: _Unproven) -> socket.socket:
        selector.unregister(one.connection)
        del self._unproven[one.connection]
        return one.connection

    # The thread of a proven connection ------------------------------------------------------------

    def _serve_peer(self, connection: socket.socket, number: int, proof: bytes) -> None:
        try:
            with connection:
                connection.settimeout(PROOF_S)
                connection.sendall(proof)
                if not self._closed:
                    self._serve(connection, number)
        except (OSError, ValueError, RayppError) as error:
            if not self._closed:
                log.info("a connection for %s ended: %s", self._purpose, error)
        finally:
            self._proven.discard(connection)


def greeting_fits(heard: bytes) -> bool:
    """Returns whether bytes can be the begin of a peer's greeting."""
    return heard[: len(_MAGIC)] == _MAGIC[: len(heard)]


def greeting(secret: bytes, number: int, listener: bytes, caller: bytes) -> bytes:
    """Returns what a peer sends first: its number, its random bytes, and the proof. `number`: less
    than 2^64. `caller`: the peer's own."""
    return _HELLO.pack(_MAGIC, number, caller, _proof(secret, b"caller", listener, caller, number))


def checked_greeting(data: bytes, secret: bytes, random: bytes) -> tuple[int, bytes, bool]:
    """Returns the peer's number, its random bytes, and whether it proved that it knows the secret.
    `data`: all the bytes that a peer sends first. `random`: the random bytes that it received."""
    magic, number, theirs, proof = _HELLO.unpack(data)
    fits = hmac.compare_digest(proof, _proof(secret, b"caller", random, theirs, number))
    return number, theirs, magic == _MAGIC and fits


def introduce(connection: socket.socket, secret: bytes, number: int, patience_s: float = PROOF_S) -> None:
    """Proves to a `Listener` that this side knows the secret, and checks the same of it.
    `connection`: just connected; its timeout changes. `number`: passed on to the `Listener`;
    covered by the proof. `patience_s`: for all that the listener says. Raises UnprovenError: the
    two sides do not have the same secret; OSError: the listener closed the connection, or did not
    answer in time."""
    end = time.monotonic() + patience_s
    theirs = receive(connection, _RANDOM, end - time.monotonic())
    mine = secrets.token_bytes(_RANDOM)
    connection.sendall(greeting(secret, number, theirs, mine))
    proof = receive(connection, _PROOF, end - time.monotonic())
    if not hmac.compare_digest(proof, _proof(secret, b"listener", theirs, mine, number)):
        raise UnprovenError("the two sides do not have the same secret")


def connect(address: str, port: int, secret: bytes, number: int = 0, timeout_s: float = PROOF_S) -> socket.socket:
    """Connects to a `Listener`; tries again while connections of others displace this one.
    `number`: see `introduce`. `timeout_s`: of the connection, and for all tries together. Raises
    OSError: see `introduce`; or nothing listens there."""
    end, pause_s = time.monotonic() + timeout_s, _PAUSE_S
    while True:
        connection = socket.create_connection((address, port), timeout_s)
        try:
            introduce(connection, secret, number, timeout_s)
            connection.settimeout(timeout_s)
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, ConnectionResetError | BrokenPipeError) or time.monotonic() + pause_s > end:
                raise
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def receive(connection: socket.socket, size: int, patience_s: float) -> bytes:
    """Receives bytes within a time, however slowly they arrive; takes memory as they arrive.
    `connection`: its timeout changes. `patience_s`: for all of them together. Raises TimeoutError:
    not all arrived in time. Raises ConnectionResetError: the other side closed the connection."""
    end, got = time.monotonic() + patience_s, bytearray()
    while len(got) < size:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"only {len(got)} of {size} bytes arrived in time")
        connection.settimeout(left_s)
        part = connection.recv(min(_PIECE, size - len(got)))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        got += part
    return bytes(got)


def _proof(secret: bytes, side: bytes, listener: bytes, caller: bytes, number: int) -> bytes:
    return hmac.digest(secret, side + listener + caller + number.to_bytes(8, "little"), "sha256")


_DIGITS = 64


class KeyValueStore(Protocol):
    """The methods of torch's store that are used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class SignedKeys:
    """A store whose values begin with an HMAC-SHA-256 of the key and the value. `secret`: the
    attempt's secret, in hex digits; empty: a signature proves nothing."""

    def __init__(self, store: KeyValueStore, secret: str) -> None:
        self._store, self._secret = store, bytes.fromhex(secret)
        self.check = store.check

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sign(key, value.encode()) + value)

    def get(self, key: str) -> bytes:
        """Returns a value, and waits for it as the store does. Raises UnreachableError: somebody
        wrote it who does not know the secret."""
        data = self._store.get(key)
        if not hmac.compare_digest(data[:_DIGITS], self._sign(key, data[_DIGITS:]).encode()):
            fault = "was written into the rendezvous by somebody who does not know the run's secret"
            raise UnreachableError(Problem(key, fault, "keep the nodes in a network of their own"))
        return data[_DIGITS:]

    def _sign(self, key: str, value: bytes) -> str:
        return hmac.digest(self._secret, f"{key}\0".encode() + value, "sha256").hex()
