"""A fault-injecting proxy: passes the bytes of a real server through, except where a rule applies.

It speaks HTTP/1.1 as far as S3 clients and servers use it (bodies with a length or in chunks), with
one thread per connection. Requests keep their Host header and their signature.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from raypp.ports import free_port

_BUFFER = 64 << 10
_REASONS = {500: "Internal Server Error", 503: "Service Unavailable", 403: "Forbidden", 429: "Too Many Requests"}


@dataclass(frozen=True)
class Request:
    """What rules can check of a request: path and query as sent, names in lower case."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """An answer of the real server: headers in lower case, without those of the connection and the
    length; the body out of its chunks."""

    status: int
    headers: dict[str, str]
    body: bytes


Wanted = Callable[[Request], bool]


def asks(method: str, words: str = "") -> Wanted:
    """Selects requests with this method and these words in their target."""
    return lambda request: request.method == method and words in request.target


Lie = Callable[[socket.socket, Request, Answer], None]
"""Sends the client an answer of its own."""


@dataclass
class Fault:
    """A rule: what happens to the requests that match.

    Attributes:
        wanted: Selects the requests.
        times: Number of requests it applies to. None: all.
        status, code: Answers with these instead of asking the server.
        cut_request_at: Resets both connections after this many bytes of the request's body.
        cut_answer_at: Resets the client's connection after this many bytes of the answer's body.
        end_answer_at: Closes the connection normally after this many bytes: the body is shorter
            than announced.
        lose_answer: The server carries the request out; the client gets a reset.
        flip_request_at, flip_answer_at: Flips a bit of this byte of the body.
        stall_s: Waits this many seconds before the answer's body.
        lie: Sends the client what it likes instead of the server's answer; then the connection is
            closed.
        then: Called after the request has been passed on and before the answer is.
        hits: How often the rule applied.
    """

    wanted: Wanted
    times: int | None = 1
    status: int = 0
    code: str = ""
    cut_request_at: int | None = None
    cut_answer_at: int | None = None
    end_answer_at: int | None = None
    lose_answer: bool = False
    flip_request_at: int | None = None
    flip_answer_at: int | None = None
    stall_s: float = 0.0
    lie: Lie | None = None
    then: Callable[[], None] | None = None
    hits: int = field(default=0, init=False)


class FaultProxy:
    """Listens on a free loopback port until `close`. `upstream` may change at a restart."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.seen: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._port = free_port()  # stays free while the proxy is down
        self.up()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def add(self, wanted: Wanted, **what: object) -> Fault:
        """Adds a rule. If several match, the first one applies."""
        fault = Fault(wanted, **what)  # type: ignore[arg-type]
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def up(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="fault-proxy").start()

    def down(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # close() alone does not wake the thread in accept(): it would accept another
            # connection.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            _reset(connection)

    close = down

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._connections.add(client)
        reader = _Reader(client)
        try:
            while self._one_request(client, reader):
                pass
        except (OSError, EOFError, ValueError):
            _reset(client)
        finally:
            with self._lock:
                self._connections.discard(client)
            with suppress(OSError):
                client.close()

    def _one_request(self, client: socket.socket, reader: _Reader) -> bool:
        """Forwards one request and its answer. Returns False when the connection is finished."""
        try:
            head = reader.head()
        except EOFError:
            return False
        first, headers = _parsed(head)
        method, target, _ = first.split(" ", 2)
        request = Request(method, target, headers)
        with self._lock:
            self.seen.append(request)
            fault = next((f for f in self._faults if (f.times is None or f.hits < f.times) and f.wanted(request)), None)
            if fault is not None:
                fault.hits += 1
        fault = fault or Fault(lambda _: False)
        if headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
        if fault.status:
            for _piece in reader.body(headers):
                pass
            client.sendall(_refusal(fault))
            return True
        place = urlsplit(self.upstream)
        with socket.create_connection((place.hostname, place.port), timeout=60) as server:
            with self._lock:
                self._connections.add(server)
            try:
                return self._pass(client, reader, server, head, request, fault)
            finally:
                with self._lock:
                    self._connections.discard(server)

    def _pass(
        self, client: socket.socket, reader: _Reader, server: socket.socket, head: bytes, request: Request, fault: Fault
    ) -> bool:
        server.sendall(head)
        sent = 0
        for piece in reader.body(request.headers):
            if fault.cut_request_at is not None and sent + len(piece) > fault.cut_request_at:
                server.sendall(piece[: fault.cut_request_at - sent])
                _reset(server)
                _reset(client)
                return False
            server.sendall(_flipped(piece, sent, fault.flip_request_at))
            sent += len(piece)
        answers = _Reader(server)
        answer = answers.head()
        while answer.split(b" ", 2)[1] == b"100":
            answer = answers.head()
        if fault.then is not None:
            fault.then()
        if fault.lie is not None:
            fault.lie(client, request, _whole(answer, answers, request))
            _end(client)
            return False
        if fault.lose_answer:
            for _piece in answers.body(_parsed(answer)[1], answer=True):
                pass
            _reset(client)
            return False
        return self._pass_answer(client, answers, answer, request, fault)

    def _pass_answer(
        self, client: socket.socket, answers: _Reader, answer: bytes, request: Request, fault: Fault
    ) -> bool:
        first, headers = _parsed(answer)
        client.sendall(answer)
        if fault.stall_s:
            time.sleep(fault.stall_s)
        if request.method == "HEAD" or first.split(" ")[1] in ("204", "304"):
            return headers.get("connection", "").lower() != "close"
        sent = 0
        for piece in answers.body(headers, answer=True):
            for limit, end in ((fault.cut_answer_at, _reset), (fault.end_answer_at, _end)):
                if limit is not None and sent + len(piece) > limit:
                    client.sendall(piece[: limit - sent])
                    end(client)
                    return False
            client.sendall(_flipped(piece, sent, fault.flip_answer_at))
            sent += len(piece)
        return headers.get("connection", "").lower() != "close" and (
            "content-length" in headers or "transfer-encoding" in headers
        )


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Runs a proxy in front of a server, and closes it on exit."""
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


class _Reader:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = b""

    def head(self) -> bytes:
        while b"\r\n\r\n" not in self._held:
            self._more()
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def body(self, headers: dict[str, str], answer: bool = False) -> Iterator[bytes]:
        """Yields the body as it is on the wire (chunk sizes included)."""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            yield from self._chunks()
        elif "content-length" in headers:
            yield from self._exactly(int(headers["content-length"]))
        elif answer:
            while True:
                if self._held:
                    piece, self._held = self._held, b""
                    yield piece
                try:
                    self._more()
                except EOFError:
                    return

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self._line()
            yield line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while True:
                    line = self._line()
                    yield line
                    if line == b"\r\n":
                        return
            yield from self._exactly(size + 2)

    def _exactly(self, left: int) -> Iterator[bytes]:
        while left:
            if not self._held:
                self._more()
            piece, self._held = self._held[:left], self._held[left:]
            left -= len(piece)
            yield piece

    def _line(self) -> bytes:
        while b"\r\n" not in self._held:
            self._more()
        line, _, self._held = self._held.partition(b"\r\n")
        return line + b"\r\n"

    def _more(self) -> None:
        piece = self._connection.recv(_BUFFER)
        if not piece:
            raise EOFError
        self._held += piece


def _whole(head: bytes, reader: _Reader, request: Request) -> Answer:
    first, headers = _parsed(head)
    status = int(first.split(" ")[1])
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    empty = request.method == "HEAD" or status in (204, 304)
    pieces = [] if empty else list(reader.body(headers, answer=True))
    wire = b"".join(pieces)
    body = wire
    if chunked:
        body = b""
        while size := int(wire.partition(b"\r\n")[0].split(b";")[0] or b"0", 16):
            rest = wire.partition(b"\r\n")[2]
            body, wire = body + rest[:size], rest[size + 2 :]
    kept = {name: value for name, value in headers.items() if name not in ("transfer-encoding", "connection")}
    if not empty:
        kept.pop("content-length", None)
    return Answer(status, kept, body)


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _refusal(fault: Fault) -> bytes:
    code = fault.code or "InternalError"
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made by the test</Message></Error>".encode()
    reason = _REASONS.get(fault.status, "No")
    return (
        f"HTTP/1.1 {fault.status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def _flipped(piece: bytes, begin: int, at: int | None) -> bytes:
    if at is None or not begin <= at < begin + len(piece):
        return piece
    changed = bytearray(piece)
    changed[at - begin] ^= 1
    return bytes(changed)


def _reset(connection: socket.socket) -> None:
    """Ends a connection with RST instead of FIN, which drops data in flight."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Wakes a thread that reads from the connection. close() alone does not.
        connection.shutdown(socket.SHUT_RD)
    with suppress(OSError):
        connection.close()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
