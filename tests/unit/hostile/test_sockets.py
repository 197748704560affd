"""Strangers at the ports of raypp's own: garbage, other protocols, silence, wrong secrets."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from strangers import MESSAGES, guess, say, silent

from raypp.errors import UnreachableError
from raypp.ports import free_port
from raypp.rank.joining.network import Chosen, Interface
from raypp.rank.joining.preflight import LinkReport, _answer, check_links, parse_place
from raypp.rank.joining.process_group import _listening, connect
from raypp.records import Coordinates, Seat
from raypp.state.memory.peer import CopyReceiver
from raypp.tools.doctor.node import NodeProbe
from raypp.untrusted import sockets
from raypp.untrusted.sockets import MOST_UNPROVEN, Listener, UnprovenError, introduce, receive

# An exception that ends a thread is a warning of pytest.
pytestmark = pytest.mark.filterwarnings("error")

SECRET = b"s" * 32
HERE = "127.0.0.1"


def echo(link: socket.socket, number: int) -> None:
    link.settimeout(60)
    link.sendall(receive(link, 5, 60) + bytes([number]))


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def listener(reported: list[str]) -> Iterator[Listener]:
    with Listener(HERE, SECRET, echo, "tests", reported.append) as one:
        yield one


def answers(port: int) -> bool:
    with sockets.connect(HERE, port, SECRET, 7) as link:
        link.sendall(b"hello")
        return receive(link, 6, 10) == b"hello\x07"


@contextmanager
def no_place(*_: object) -> Iterator[Any]:
    raise OSError("no copy is expected")


def bare() -> tuple[int, Callable[[], None]]:
    one = Listener(HERE, SECRET, echo, "tests")
    return one.port, one.close


def memory() -> tuple[int, Callable[[], None]]:
    one = CopyReceiver(HERE, SECRET, 2, no_place)  # type: ignore[arg-type]
    return one.port, one.close


def preflight() -> tuple[int, Callable[[], None]]:
    one = Listener(HERE, SECRET, partial(_answer, identity="run/1/0", payload=1000), "preflight")
    return one.port, one.close


def probe() -> tuple[int, Callable[[], None]]:
    one = NodeProbe(SECRET.hex())
    return one.listen(HERE), one.close


@pytest.mark.parametrize("opened", [bare, memory, preflight, probe])
def test_whoever_says_anything_else_is_refused_at_once(
    opened: Callable[[], tuple[int, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PROOF_S", 300.0)  # so that no limit of time refuses
    port, close = opened()
    before = threading.active_count()
    try:
        for name, message in MESSAGES.items():
            for half in (False, True):
                if message or half:
                    assert len(say((HERE, port), message, half=half)) <= 32, name
        with pytest.raises(UnprovenError, match="do not have the same secret"):
            guess((HERE, port))
        assert threading.active_count() == before
    finally:
        close()


def test_a_peer_that_knows_the_secret_is_served_and_its_number_arrives(listener: Listener) -> None:
    assert answers(listener.port) and not listener.refused


def test_the_first_refusal_is_reported_with_address_and_reason_and_all_are_counted(
    listener: Listener, reported: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(5):
        with pytest.raises(UnprovenError):
            guess((HERE, listener.port))
    assert eventually(lambda: listener.refused == 5)
    assert reported == ["a connection from 127.0.0.1 to the port for tests was refused: it does not know the secret"]
    assert answers(listener.port)
    listener.close()
    assert "the port for tests refused 5 connections" in caplog.text
    assert SECRET.decode() not in caplog.text and SECRET.hex() not in caplog.text


def test_a_greeting_that_arrives_slowly_is_refused_when_the_time_is_up(
    listener: Listener, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PROOF_S", 0.5)
    with silent((HERE, listener.port), 1) as (idle,), silent((HERE, listener.port), 1) as (slow,):
        receive(slow, 32, 5)
        sent = 0
        for byte in sockets._MAGIC * 10:
            try:
                slow.send(bytes([byte]))
            except OSError:
                break
            sent += 1
            time.sleep(0.1)
        assert 0 < sent < 60
        receive(idle, 32, 5)
        assert idle.recv(1) == b""
    assert listener.refused == 2 and len(reported) == 1 and "it proved nothing within" in reported[0]
    assert answers(listener.port)


def test_a_thousand_silent_connections_take_no_thread_and_keep_nobody_out(
    listener: Listener, reported: list[str]
) -> None:
    before = threading.active_count()
    with silent((HERE, listener.port), 1000):
        assert answers(listener.port)
        assert threading.active_count() <= before + 1
        assert len(listener._unproven) <= MOST_UNPROVEN
        assert answers(listener.port)
    assert len(reported) == 1 and f"{MOST_UNPROVEN} others wait without a proof" in reported[0]
    assert eventually(lambda: listener.refused == 1000)


def test_a_lack_of_descriptors_fails_where_a_listener_is_made() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as last, ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(20)]
        last.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                Listener(HERE, SECRET, echo, "tests")  # one descriptor is free
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_listener_outlives_a_lack_of_descriptors(listener: Listener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(20)]
        highest = held[-1].fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            for one in held:
                one.settimeout(60)
                one.connect((HERE, listener.port))
            time.sleep(0.2)  # the listener tries to accept meanwhile
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answers(listener.port)


def test_a_greeting_that_was_overheard_is_worth_nothing(listener: Listener) -> None:
    sent: list[bytes] = []

    class Overheard(socket.socket):
        def sendall(self, data: Any, *_: Any) -> None:
            sent.append(bytes(data))
            super().sendall(data)

    with Overheard() as link:
        link.connect((HERE, listener.port))
        introduce(link, SECRET, 3)
    heard = say((HERE, listener.port), sent[0])
    assert len(heard) == 64 and not any(heard[32:])


def test_a_closed_listener_leaves_no_thread_and_no_connection(reported: list[str]) -> None:
    before = threading.active_count()
    one = Listener(HERE, SECRET, lambda link, _: link.recv(1) and None, "tests", reported.append)
    with sockets.connect(HERE, one.port, SECRET) as proven, silent((HERE, one.port), 3) as (idle, *_):
        receive(idle, 32, 5)
        one.close()
        assert proven.recv(1) == b"" and idle.recv(1) == b""
        with pytest.raises(OSError):
            socket.create_connection((HERE, one.port), 1)
    assert eventually(lambda: threading.active_count() == before) and not reported


# A false listener ---------------------------------------------------------------------------------


@contextmanager
def false_listener(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serves each connection with a function, in a thread."""
    with socket.create_server((HERE, 0)) as server:

        def run() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link, suppress(OSError):
                    serve(link)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def drip(link: socket.socket) -> None:
    while True:
        link.sendall(b"x")
        time.sleep(0.05)


def swallow(link: socket.socket) -> None:
    while link.recv(1 << 16):
        pass


def flood(link: socket.socket) -> None:
    link.sendall(bytes(1 << 16))
    link.recv(1 << 16)


@pytest.mark.parametrize(
    ("serve", "error"),
    [(drip, TimeoutError), (flood, UnprovenError), (swallow, TimeoutError), (lambda link: None, ConnectionResetError)],
    ids=["slow", "garbage", "silent", "closes"],
)
def test_a_false_listener_is_noticed_in_time(serve: Callable[[socket.socket], None], error: type[OSError]) -> None:
    with false_listener(serve) as port, pytest.raises(error):
        sockets.connect(HERE, port, SECRET, timeout_s=0.5)


# The preflight ------------------------------------------------------------------------------------


class Rendezvous(dict[str, bytes]):
    """The methods of torch's store that the preflight uses."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_links_are_tried_while_strangers_are_at_the_port(reported: list[str]) -> None:
    nodes, store = ("127.0.0.1", "127.0.0.2"), Rendezvous()
    reports: dict[int, list[LinkReport]] = {}

    def node(number: int) -> None:
        seat = Seat(
            "run", 1, number, 2, Coordinates(pp=number), Coordinates(2, 1, 1, 1, 1), node_rank=number,
            node=nodes[number], nodes=nodes, secret=SECRET.hex(),
        )  # fmt: skip
        chosen = Chosen(Interface("lo", nodes[number], 0, True), "on the route")
        reports[number] = check_links(seat, chosen, store, 30, reported.append)

    threads = [threading.Thread(target=node, args=(number,)) for number in (1, 0)]
    threads[0].start()
    assert eventually(lambda: "preflight/1" in store)
    port = parse_place(store["preflight/1"], "preflight/1").port
    with silent((nodes[1], port), 200):
        with pytest.raises(UnprovenError):
            guess((nodes[1], port))
        assert say((nodes[1], port), MESSAGES["http"])
        threads[1].start()
        for thread in threads:
            thread.join(30)
    assert [(one.node, one.peer) for one in reports[0]] == [nodes] and reports[1] == []
    assert len(reported) == 1 and "the port for preflight was refused" in reported[0]


def test_a_listener_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a secret"):
        Listener(HERE, b"", echo, "tests")


# The rendezvous -----------------------------------------------------------------------------------


def test_the_rendezvous_listens_on_its_address_only() -> None:
    for address in ("127.0.0.1", "127.0.0.5", "localhost"):
        descriptor = _listening(address, free_port())
        assert descriptor is not None
        with socket.socket(fileno=descriptor) as one:
            assert one.getsockname()[0] == address.replace("localhost", "127.0.0.1")
    assert _listening("a-name.example", 1) is None


def test_an_address_of_another_machine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert _listening("192.0.2.1", free_port()) is None
    assert "does not have the address 192.0.2.1: the rendezvous listens on all addresses" in caplog.text


def test_a_port_that_was_taken_is_named() -> None:
    with socket.create_server((HERE, 0)) as taken, pytest.raises(UnreachableError, match="another process has taken"):
        connect(HERE, taken.getsockname()[1], 2, serve=True, timeout_s=5)


def test_the_secret_of_a_seat_is_not_shown() -> None:
    seat = Seat("run", 1, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1), secret="ab" * 32)
    assert "ab" * 32 not in f"{seat} {seat!r}"
