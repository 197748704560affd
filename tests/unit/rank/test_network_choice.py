"""The choice of a rank's interface and the preflight of its links, on loopback addresses."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from raypp.errors import UnreachableError
from raypp.rank.joining import network
from raypp.rank.joining.network import Chosen, Interface, choose_interface, nccl_sockets, prepare_network
from raypp.rank.joining.preflight import check_links, links_in_words, wait_for_master
from raypp.records import Coordinates, Seat

pytestmark = pytest.mark.skipif(not network.interfaces().get("lo"), reason="needs Linux's loopback interface")

SEAT = Seat(
    run="r", attempt=1, rank=0, world_size=2, coordinates=Coordinates(), mesh_sizes=Coordinates(2, 1, 1, 1, 1),
    node="127.0.0.1", nodes=("127.0.0.1", "127.0.0.9"), interface="lo", secret="5e" * 32,
)  # fmt: skip


class DictStore:
    """The methods of torch's store that the preflight uses."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)


def test_the_route_to_the_peer_decides() -> None:
    chosen = choose_interface(SEAT, {})
    assert (chosen.interface.name, chosen.why) == ("lo", "on the route to 127.0.0.9")
    far = replace(SEAT, node="127.0.0.9")
    assert choose_interface(far, {}).why == "on the route to 127.0.0.1"


def test_the_users_interface_counts_and_one_that_is_not_there_is_named() -> None:
    assert choose_interface(SEAT, {"NCCL_SOCKET_IFNAME": "=lo"}).why == "named by the job's environment"
    with pytest.raises(UnreachableError, match="no interface 'eth77'"):
        choose_interface(SEAT, {"GLOO_SOCKET_IFNAME": "eth77"})


def test_a_prefix_counts_where_nccl_takes_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Interface("eth10", "10.0.0.1", 0, True)
    monkeypatch.setattr(network, "interfaces", lambda: {"eth10": card})
    assert choose_interface(SEAT, {"NCCL_SOCKET_IFNAME": "eth1"}).interface is card
    for named in ({"NCCL_SOCKET_IFNAME": "=eth1"}, {"GLOO_SOCKET_IFNAME": "eth1"}):
        with pytest.raises(UnreachableError, match="no interface 'eth1'"):
            choose_interface(SEAT, named)


def test_what_an_earlier_attempt_set_is_not_taken_for_the_users() -> None:
    environment: dict[str, str] = {}
    prepare_network(SEAT, environment)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    again, _ = prepare_network(SEAT, environment)
    assert again.why.startswith("on the route")


def test_nccl_gets_more_sockets_over_fast_ethernet_only_and_never_against_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [nccl_sockets(speed) for speed in (1_000, 10_000, 25_000, 100_000, 0)] == [
        (1, 1), (1, 1), (2, 4), (4, 4), (2, 4),
    ]  # fmt: skip
    monkeypatch.setattr(network, "_has_infiniband", lambda: False)
    environment = {"NCCL_NSOCKS_PERTHREAD": "2"}
    _, reported = prepare_network(replace(SEAT, device="cuda"), environment)
    assert environment["NCCL_NSOCKS_PERTHREAD"] == "2"
    assert "NCCL_NSOCKS_PERTHREAD as the user set" in reported[-1]
    alone: dict[str, str] = {}
    prepare_network(replace(SEAT, device="cuda", nodes=("127.0.0.1",), local_world_size=2), alone)
    assert "NCCL_SOCKET_NTHREADS" not in alone
    under_torchrun: dict[str, str] = {}
    prepare_network(replace(SEAT, device="cuda", nodes=(), world_size=4, local_world_size=2), under_torchrun)
    assert "NCCL_SOCKET_NTHREADS" in under_torchrun


def _chosen(address: str, why: str = "on the route to …") -> Chosen:
    return Chosen(Interface("lo", address, 0, True), why)


def _together(
    places: list[tuple[Seat, Chosen]], patience_s: float = 20.0, ahead_s: dict[int, float] | None = None
) -> list[Any]:
    """Returns what the check of each node says; `ahead_s`: nodes whose clocks are wrong."""
    store, outcomes = DictStore(), [None] * len(places)

    def one(index: int) -> None:
        seat, chosen = places[index]
        try:
            outcomes[index] = check_links(  # type: ignore[call-overload]
                seat, chosen, store, patience_s, clock=lambda: time.time() + (ahead_s or {}).get(index, 0.0)
            )
        except UnreachableError as error:
            outcomes[index] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_three_nodes_try_every_link_once() -> None:
    nodes = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    seats = [(replace(SEAT, node=node, node_rank=i, nodes=nodes), _chosen(node)) for i, node in enumerate(nodes)]
    first, second, third = _together(seats)
    assert [(report.node, report.peer) for report in (*first, *second, *third)] == [
        ("127.0.0.1", "127.0.0.2"),
        ("127.0.0.1", "127.0.0.3"),
        ("127.0.0.2", "127.0.0.3"),
    ]
    assert all(report.mbps > 0 < report.seconds for report in (*first, *second))


def test_clocks_that_differ_are_named() -> None:
    nodes = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    seats = [(replace(SEAT, node=node, node_rank=i, nodes=nodes), _chosen(node)) for i, node in enumerate(nodes)]
    first, second, _ = _together(seats, ahead_s={1: -1000.0})
    assert "the clock of 127.0.0.2 is 1000.0 s behind that of 127.0.0.1: run an NTP" in links_in_words(
        _chosen("127.0.0.1"), first
    )
    assert "the clock of 127.0.0.3 is 1000.0 s ahead of that of 127.0.0.2" in links_in_words(
        _chosen("127.0.0.2"), second
    )
    assert "clock" not in links_in_words(_chosen("127.0.0.1"), _together(seats)[0])


def test_an_interface_on_which_nobody_answers_is_named_with_the_pair_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = ("127.0.0.1", "127.0.0.2")
    wrong = _chosen("127.0.0.2", "named by the job's environment")
    seats = [
        (replace(SEAT, node=node, node_rank=index, nodes=nodes), one)
        for index, (node, one) in enumerate(zip(nodes, (_chosen("127.0.0.1"), wrong), strict=True))
    ]
    import raypp.rank.joining.preflight as preflight

    # Another server at the address that the second node publishes.
    true_hello = preflight._hello
    monkeypatch.setattr(preflight, "_answer", lambda link, *_, **__: link.sendall(true_hello("somebody")))
    first, _ = _together(seats, patience_s=1.0)
    assert isinstance(first, UnreachableError)
    problem = first.problems[0]
    assert "127.0.0.1 (interface lo" in problem.fault
    assert "cannot exchange data with 127.0.0.2 at 127.0.0.2" in problem.fault
    assert "another process answers" in problem.fault
    assert "GLOO_SOCKET_IFNAME" in problem.fix


def test_a_node_that_does_not_come_is_named() -> None:
    (outcome,) = _together([(SEAT, _chosen("127.0.0.1"))], patience_s=0.2)
    assert "ranks of node 127.0.0.9 did not reach the network check" in str(outcome)


def test_one_node_tries_nothing() -> None:
    assert check_links(replace(SEAT, nodes=("127.0.0.1",)), _chosen("127.0.0.1"), DictStore()) == []


def test_a_rank_zero_that_is_gone_is_distinguished_from_a_network_that_fails() -> None:
    seat = replace(SEAT, rank=1, node="127.0.0.9", master_addr="127.0.0.1", master_port=1)
    with pytest.raises(UnreachableError, match=r"127.0.0.9 cannot reach rank 0's node 127.0.0.1.*nothing listens"):
        wait_for_master(seat, _chosen("127.0.0.9"), patience_s=0.2)


def test_under_torchrun_a_host_name_that_is_loopback_here_is_refused_if_there_are_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "interface_to", lambda peer: network.interfaces()["lo"])  # 127.0.1.1 in /etc/hosts
    seat = replace(SEAT, nodes=(), interface="", master_addr="desk", world_size=4, local_world_size=2)
    with pytest.raises(UnreachableError, match=r"desk is 127.0.0.1 on 127.0.0.1, which no other node can reach"):
        choose_interface(seat, {})
    assert choose_interface(replace(seat, local_world_size=4), {}).interface.name == "lo"
    for one_machine in ("127.0.0.1", "localhost"):
        assert choose_interface(replace(seat, master_addr=one_machine), {}).interface.name == "lo"
