"""Attacks ports: connections that say nothing, garbage, other protocols, wrong secrets, slowly."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from raypp.untrusted.sockets import introduce

Address = tuple[str, int]

MESSAGES = {
    "nothing": b"",
    "zeros": bytes(4096),
    "a length of 2^63": struct.pack("<Q", 2**63) * 8,
    "http": b"GET / HTTP/1.1\r\nHost: raypp\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "a pickle": b"\x80\x04\x95" + bytes(8) + b"cposix\nsystem\n(S'true'\ntR.",
    "deep json": b"[" * 100_000,
    "a text": b"hello\n" * 1000,
    "garbage": bytes(range(256)) * 64,
}


def say(address: Address, message: bytes, *, half: bool = False, patience_s: float = 10.0) -> bytes:
    """Connects, sends, may close its own direction (`half`), and returns all that comes back until
    the other side closes. Raises TimeoutError if it does not."""
    heard, end = b"", time.monotonic() + patience_s
    with socket.create_connection(address, 5) as one:
        try:
            one.sendall(message)
            if half:
                one.shutdown(socket.SHUT_WR)
            while time.monotonic() < end:
                one.settimeout(max(0.01, end - time.monotonic()))
                part = one.recv(4096)
                if not part:
                    return heard
                heard += part
        except TimeoutError:
            pass
        except OSError:  # closed before everything was sent
            return heard
    raise TimeoutError(f"{address} does not close a connection that sent {message[:20]!r}")


def guess(address: Address, patience_s: float = 5.0) -> None:
    """Speaks the protocol with a secret of its own, which raises UnprovenError as it should."""
    with socket.create_connection(address, 5) as one:
        introduce(one, b"guess", 0, patience_s)


@contextmanager
def silent(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Holds connections that send nothing. Those that the other side refuses are missing."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(stack.enter_context(socket.create_connection(address, 2)))
        yield held


class Siege:
    """Attacks ports in a thread, with silent connections to each `at_once`. Counts the connections
    that the ports have accepted."""

    def __init__(self, addresses: list[Address], at_once: int) -> None:
        self.connections = 0
        self._addresses, self._at_once = addresses, at_once
        self._thread = threading.Thread(target=self._attack, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _attack(self) -> None:
        for address in self._addresses:
            with silent(address, self._at_once) as held:
                self.connections += len(held)
                for message in MESSAGES.values():
                    self._one(address, message)
                with contextlib.suppress(OSError):
                    guess(address, 0.3)
                for number, one in enumerate(held):  # slow ones: a byte from time to time
                    with contextlib.suppress(OSError):
                        one.send(b"R" if number % 2 else b"\xff")

    def _one(self, address: Address, message: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, 2) as one:
            self.connections += 1
            one.settimeout(2)
            one.sendall(message)
            one.shutdown(socket.SHUT_WR)
