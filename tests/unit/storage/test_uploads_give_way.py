"""A limited upload waits while the training's bytes are under way, but never for ever."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from stand_in_clock import StandInClock, wait_until

from raypp.storage import rate_limit
from raypp.storage.rate_limit import LOW_PRIORITY, YIELDED, Abandoned, OtherTraffic, Pace

MESSAGE = 1 << 20


@contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends of a TCP connection whose receiver has a small buffer."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        listener.bind((host, 0))
        listener.listen(1)
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        yield sender, receiver


def send_unread(sender: socket.socket) -> int:
    """Writes until the kernel takes no more; returns how much that was."""
    sender.setblocking(False)
    sent = 0
    try:
        while True:
            sent += sender.send(bytes(MESSAGE))
    except BlockingIOError:
        sender.setblocking(True)
        return sent


def read(receiver: socket.socket, size: int) -> None:
    while size:
        size -= len(receiver.recv(min(size, MESSAGE)))


def elsewhere(own: str, peer: str) -> bool:
    """Takes connections on loopback for ones that leave this host."""
    return False


def until(condition: bool, traffic: OtherTraffic) -> None:
    """The other end's kernel acknowledges what was read, at its own time."""
    wait_until(lambda: traffic.is_under_way() is condition)


def test_a_message_is_under_way_until_the_other_end_has_it() -> None:
    with connection() as (sender, receiver):
        traffic = OtherTraffic(elsewhere)
        assert not traffic.is_under_way()
        sent = send_unread(sender)
        assert traffic.is_under_way()
        read(receiver, sent)
        until(False, traffic)


def test_a_heartbeat_is_no_message() -> None:
    with connection() as (sender, _receiver):
        sender.sendall(bytes(100))
        assert not OtherTraffic(elsewhere).is_under_way()


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_uploads_and_copies_do_not_give_way_to_each_other(family: str) -> None:
    with socket.socket(socket.AF_INET if family == "IPv4" else socket.AF_INET6) as listener:
        try:
            listener.bind(("127.0.0.1" if family == "IPv4" else "::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen(1)
        with closing(socket.socket(listener.family)) as sender:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
            sender.connect(listener.getsockname())
            send_unread(sender)
            assert not OtherTraffic(elsewhere).is_under_way()
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0)
            assert OtherTraffic(elsewhere).is_under_way(), "the mark is what made the difference"


def test_what_stays_on_this_host_does_not_count() -> None:
    with connection() as (sender, _receiver):
        send_unread(sender)
        assert not OtherTraffic().is_under_way()


def test_connections_that_come_and_go_are_noticed() -> None:
    traffic = OtherTraffic(elsewhere)
    assert not traffic.is_under_way()
    for _ in range(2):
        with connection() as (sender, _receiver):
            send_unread(sender)
            until(True, traffic)
        until(False, traffic)


def take_all(pace: Pace, total: int) -> None:
    for _ in range(0, total, pace.piece_bytes):
        pace.take(pace.piece_bytes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    clock = StandInClock()
    monkeypatch.setattr(rate_limit, "time", clock)
    return clock


def test_pieces_wait_for_the_end_of_a_message() -> None:
    """The bytes that leave while a message is under way are less than those of the limit."""
    with connection() as (sender, receiver):
        sent = send_unread(sender)
        traffic = OtherTraffic(elsewhere)
        reading = threading.Timer(0.05, read, (receiver, sent))

        def gives_way() -> bool:
            under_way = traffic.is_under_way()
            if under_way and not reading.is_alive() and reading.ident is None:
                reading.start()
            return under_way

        pace = Pace(4e6, gives_way=gives_way)
        take_all(pace, 400_000)
        reading.join()
        assert pace.yielded_s > 0


def test_a_save_goes_on_although_the_others_never_pause(clock: StandInClock) -> None:
    """It takes at most 1 + YIELDED times as long as with the limit alone."""
    pace, begun, seconds = Pace(2e6, gives_way=lambda: True), clock.now, 400_000 / 2e6
    take_all(pace, 400_000)
    assert pace.yielded_s == pytest.approx(YIELDED * seconds)
    last_piece_s = pace.piece_bytes / 2e6
    assert clock.now == pytest.approx(begun + (1 + YIELDED) * seconds - last_piece_s)


def test_without_other_traffic_nothing_is_lost() -> None:
    pace = Pace(4e6, gives_way=lambda: False)
    take_all(pace, 400_000)
    assert pace.yielded_s == 0


class Turns:
    """Turns of the writers, with the times at which they ended."""

    def __init__(self, clock: StandInClock) -> None:
        self.ended: list[float] = []
        self._clock, self._lock = clock, threading.Lock()

    def acquire(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.ended.append(self._clock.now)
        self._lock.release()


def test_what_waited_together_does_not_leave_together(clock: StandInClock) -> None:
    """Four parts wait for the same message: the limit holds after it, too."""
    begun = clock.now
    pace = Pace(1e6, gives_way=lambda: clock.now < begun + 0.02)
    turns = pace._bucket.turn = Turns(clock)  # type: ignore[assignment]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take_all, [pace] * 4, [4 * pace.piece_bytes] * 4))
    assert len(turns.ended) == 16
    apart = [later - earlier for earlier, later in pairwise(turns.ended)]
    assert min(apart) == pytest.approx(pace.piece_bytes / 1e6), "ahead of the limit"


def test_an_upload_that_gives_way_can_be_stopped() -> None:
    stop = threading.Event()
    pace = Pace(1e4, gives_way=lambda: True).shared(stop.is_set)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Abandoned):
        take_all(pace, 10**6)  # 100 s


def test_one_that_waits_for_its_turn_can_be_stopped_alone() -> None:
    """The copies of snapshots share the limit with the uploads, and end at other times."""
    pace, stop = Pace(1e3, gives_way=lambda: True), threading.Event()
    other_stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take_all, pace.shared(other_stop.is_set), 10**6)
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(Abandoned):
            take_all(pace.shared(stop.is_set), 10**6)
        assert not first.done()
        other_stop.set()
        with pytest.raises(Abandoned):
            first.result(30)
