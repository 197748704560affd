"""A process whose join failed because a peer died joins new processes in the next attempt."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from raypp.errors import UnreachableError
from raypp.ports import free_port
from raypp.rank.joining.abort import cut_connections
from raypp.rank.joining.lost_peer import lost_peer
from raypp.rank.joining.process_group import connect, joined
from raypp.records import Coordinates, Seat


def test_a_join_that_failed_leaves_no_trace_in_the_name_of_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    store = connect("127.0.0.1", 0, 1, serve=True, timeout_s=5.0)
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(milliseconds=200))
    seat = Seat(
        run="r", attempt=2, rank=0, world_size=1, coordinates=Coordinates(), mesh_sizes=Coordinates(1, 1, 1, 1, 1),
        local_rank=0, node_rank=0, node="127.0.0.1", master_addr="127.0.0.1", master_port=store.port, interface="lo",
        device="cpu", device_index=0,
    )  # fmt: skip
    with joined(seat, 5.0, store):
        assert dist.group.WORLD is not None
        name = dist.group.WORLD.group_name
    assert name == "0", "new processes call it 0; who calls it otherwise waits for them in vain"


def assert_comes_free(wait: Callable[[], object], port: int) -> None:
    """Asserts that a rank's wait ends as that of a lost peer when its connections are cut."""
    ended: list[BaseException] = []

    def waits() -> None:
        try:
            wait()
        except RuntimeError as error:
            ended.append(error)

    rank = threading.Thread(target=waits, daemon=True)
    rank.start()
    time.sleep(0.1)
    assert rank.is_alive()
    cut_connections(port)
    rank.join(2.0)
    assert not rank.is_alive() and lost_peer(ended[0])


def test_a_rank_that_waits_for_a_dead_rank_0_comes_free_when_asked_to_leave() -> None:
    port = free_port()
    assert_comes_free(lambda: connect("127.0.0.1", port, 2, serve=False, timeout_s=60.0), port)


def test_a_rank_that_serves_waits_for_the_others_where_it_can_be_asked_to_leave() -> None:
    store = connect("127.0.0.1", 0, 2, serve=True, timeout_s=60.0)
    assert_comes_free(lambda: store.get("never"), store.port)


def test_a_meeting_point_that_somebody_else_has_taken_meanwhile_is_reported_as_that() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"another process has taken port {port} of 127.0.0.1"):
            connect("127.0.0.1", port, 2, serve=True, timeout_s=5.0)


def test_a_join_whose_server_goes_while_it_connects_ends_with_the_attempt() -> None:
    """Rank 0 listens and is killed before it serves: TCPStore alone tries again until its timeout,
    here for longer than the test may take."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = threading.Event()

        def drop() -> None:
            listener.settimeout(0.05)
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()

        dropping = threading.Thread(target=drop)
        dropping.start()
        cutting = threading.Timer(0.3, cut_connections, (port,))
        cutting.start()
        try:
            with pytest.raises(dist.DistNetworkError, match="no rank 0 at"):
                connect("127.0.0.1", port, 2, serve=False, timeout_s=3600.0)
        finally:
            ended.set()
            dropping.join()
            cutting.join()
