"""Ports for servers that start later: nothing else takes them meanwhile."""

import random
import socket
from pathlib import Path

import pytest

from raypp import ports
from raypp.ports import address_towards, free_ports, held_port, place_of
from raypp.state.memory.peer import own_address


def test_ports_are_free_all_different_and_none_that_the_kernel_deals_out() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = free_ports(20)
    assert len(set(found)) == 20 and all(20_000 <= port < lowest for port in found)
    assert set(free_ports(20)) != set(found)
    with socket.socket() as server:
        server.bind(("127.0.0.1", found.pop()))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the range of ports that the kernel deals out."""
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    return tmp_path / "range"


@pytest.mark.parametrize("text", ["1024 65535", "20001 20001", "?"])
def test_where_the_kernel_leaves_too_few_such_ports_it_chooses(kernels: Path, text: str) -> None:
    kernels.write_text(text)
    found = free_ports(4)
    assert len(set(found)) == 4 and all(1024 <= port < 65536 for port in found)


def test_a_port_that_somebody_listens_on_is_not_given(kernels: Path) -> None:
    kernels.write_text("20010 60999")
    taken = next(port for port in range(20_000, 20_010) if ports.port_is_free(port))
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        assert taken not in free_ports(10)


def test_a_port_that_another_process_has_chosen_is_not_given(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = random.SystemRandom().randrange(3_000, 5_900)  # below all that other processes choose from
    kernels.write_text(f"{first + 10} 60999")
    monkeypatch.setattr(ports, "_LOWEST", first)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0raypp-port-{first + 5}")
        assert first + 5 not in free_ports(10)
    mine = free_ports(1)
    assert mine == [first + 5] or not ports.port_is_free(first + 5), "its owner has ended"
    assert all(port >= first + 10 for port in free_ports(10)), "all below were chosen before"


def test_a_port_of_ones_own_choice_is_held_by_one_process_until_its_server_listens(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test above has the ports below 6000.
    port = next(port for port in random.SystemRandom().sample(range(6_000, 9_000), 100) if ports.port_is_free(port))
    kernels.write_text(f"{port + 1} 60999")
    monkeypatch.setattr(ports, "_LOWEST", port)
    with held_port(port) as mine:
        assert mine
        with held_port(port) as theirs:
            assert not theirs
        assert port not in free_ports(3)
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()
    with held_port(port) as mine, socket.socket() as server:
        assert mine, "it is given back at the end"
        server.bind(("127.0.0.1", port))
        server.listen()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with held_port(port) as mine:
            assert not mine, "a server listens there"


def test_addresses_of_ipv6_are_addresses_too(kernels: Path) -> None:
    for text in ("1024 65535", "30000 60999"):  # chosen by the kernel, and below its range
        kernels.write_text(text)
        (port,) = free_ports(1, "::1")
        with socket.socket(socket.AF_INET6) as server:
            server.bind(("::1", port))
            server.listen()
            assert not ports.port_is_free(port, "::1")
    assert address_towards("::1") == own_address("::1", "nowhere") == own_address("name", "::1") == "::1"
    assert address_towards("127.0.0.1") == "127.0.0.1" and own_address("10.1.2.3", "nowhere") == "10.1.2.3"
    assert [place_of(host, 80) for host in ("::1", "10.0.0.1", "node")] == ["[::1]:80", "10.0.0.1:80", "node:80"]
