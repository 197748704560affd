"""Tests that the test bed limits and cuts cables, and leaves nothing behind. Without Ray."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beds import bare_bed, bed_name
from laptop import wait_for
from programs import run_program

from cluster.testbed import Cut, TestBed, why_not
from cluster.testbed.bed import remove
from cluster.testbed.network import leftovers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_LISTEN = """
import socket
server = socket.create_server(("", 5555))
print("listens", flush=True)
while True:
    link, _ = server.accept()
    count = 0
    while part := link.recv(1 << 20):
        count += len(part)
    print(count, flush=True)
"""
_SEND = """
import socket, sys
link = socket.create_connection((sys.argv[1], 5555), timeout=3)
link.settimeout(None)
link.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[TestBed]:
    with bare_bed(2, "40mbit") as bed:
        yield bed


@pytest.fixture
def listener(bare: TestBed) -> Iterator[subprocess.Popen[Any]]:
    process = bare.popen(0, [sys.executable, "-c", _LISTEN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    yield process
    process.kill()


def _send(bed: TestBed, count: int) -> int:
    done = bed.run(1, [sys.executable, "-c", _SEND, bed.network.address(0), str(count)], capture_output=True)
    return done.returncode


def test_a_cable_is_limited_at_both_ends_and_carries_all_bytes(bare: TestBed, listener: subprocess.Popen[Any]) -> None:
    assert listener.stdout is not None
    for rate in ("20mbit", "40mbit"):
        bare.set_rate(1, rate)
        outward = bare.run(1, ["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True)
        inward = run_program("tc", "qdisc", "show", "dev", bare.network.cable(1))
        assert f"rate {rate}" in outward.stdout.lower() and f"rate {rate}" in inward.stdout.lower()
        assert _send(bare, 4_000_000) == 0
        assert listener.stdout.readline() == "4000000\n"


def test_a_slow_cable_does_not_cut_blocks_into_packets(bare: TestBed, listener: subprocess.Popen[Any]) -> None:
    """If blocks arrived as single packets, each would wake the reader, which the network card
    prevents on real hosts. Split blocks cost a rank 13 %."""
    assert listener.stdout is not None
    counted = Path(f"/sys/class/net/{bare.network.cable(1)}/statistics")
    before = [int((counted / name).read_text()) for name in ("rx_bytes", "rx_packets")]
    assert _send(bare, 4_000_000) == 0
    listener.stdout.readline()
    sent, blocks = (
        int((counted / name).read_text()) - b for name, b in zip(("rx_bytes", "rx_packets"), before, strict=True)
    )
    assert sent / blocks > 20_000


def test_a_far_host_is_reached_through_the_relay_only(bare: TestBed, listener: subprocess.Popen[Any]) -> None:
    assert listener.stdout is not None
    with bare.network.far_apart([1], "20mbit", 0.01):
        assert _send(bare, 1_000_000) == 0
        assert listener.stdout.readline() == "1000000\n"
        (tap,) = Path(f"/sys/class/net/{bare.network.bridge}").glob("brif/rt-*-t0")
        assert int((tap.resolve().parent / "statistics/rx_bytes").read_text()) > 1_000_000
    assert _send(bare, 1000) == 0
    assert [one.name for one in Path("/sys/class/net").glob(f"{bare.network.bridge}2")] == []


@pytest.mark.parametrize("how", list(Cut))
def test_a_cut_cable_carries_nothing_until_it_is_healed(
    bare: TestBed, listener: subprocess.Popen[Any], how: Cut
) -> None:
    bare.cut(1, how)
    said = {Cut.BOTH: "cut", Cut.OUT: "cut outward", Cut.IN: "cut inward"}[how]
    assert [one["cable"] for one in bare.status()] == ["40mbit", said]
    assert _send(bare, 1000) != 0
    bare.heal(1)
    wait_for(lambda: _send(bare, 1000) == 0, "bytes over the healed cable")  # it asks for addresses anew
    assert bare.status()[1]["cable"] == "40mbit"


def test_a_frozen_host_stands_still_and_a_killed_one_is_empty(bare: TestBed) -> None:
    process = bare.popen(1, ["sleep", "600"])
    wait_for(lambda: bare.network.pids(1), "the process")
    assert bare.freeze(1) == 1
    assert bare.status()[1]["frozen"]
    bare.thaw(1)
    assert not bare.status()[1]["frozen"]
    bare.kill(1)
    assert bare.network.pids(1) == []
    assert process.wait(5) != 0


def test_what_a_killed_owner_left_is_removed_by_name() -> None:
    if reason := why_not():
        pytest.skip(reason)
    name = bed_name()
    program = (
        "import time; from cluster.testbed import TestBed\n"
        f"bed = TestBed.up({name!r}, hosts=2, ray=False)\n"
        "bed.popen(1, ['sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    owner.kill()
    owner.wait()
    assert leftovers(name)
    pids = TestBed.open(name).network.pids(1)
    assert pids
    assert remove(name)
    assert leftovers(name) == []
    assert not Path(f"/tmp/rt-{name}").exists()
    assert not list(Path("/etc/netns").glob(f"rt-{name}-*"))
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not remove(name)


_BESIDE_DOCKER = """
import subprocess, sys
from cluster.testbed import NetworkError, TestBed
def iptables(*words):
    return subprocess.run(["iptables", "-w", *words], check=True, capture_output=True, text=True).stdout
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
open("/proc/sys/net/bridge/bridge-nf-call-iptables", "w").write("1")
iptables("-P", "FORWARD", "DROP")
before = iptables("-S")
with TestBed.up(sys.argv[1], hosts=3, ray=False, store=False) as bed:
    bed.network.check_reachability()
    (rule,) = set(iptables("-S").splitlines()) - set(before.splitlines())
    print(rule)
assert iptables("-S") == before
iptables("-t", "mangle", "-P", "FORWARD", "DROP")  # a firewall that does not ask this rule
try:
    TestBed.up(sys.argv[1], hosts=2, store=False)
except NetworkError as error:
    print(error)
assert iptables("-S") == before
"""


def test_beside_docker_the_hosts_reach_each_other_and_a_firewall_that_drops_their_packets_is_named() -> None:
    """Docker drops what it does not forward, bridged packets included. In a network namespace of
    its own, so that this machine's firewall stays as it is."""
    if reason := why_not():
        pytest.skip(reason)
    if shutil.which("iptables") is None or not Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        pytest.skip("no iptables, or a kernel that does not filter bridges")
    name = bed_name()
    alone = ("unshare", "--net", "--mount", sys.executable, "-c")
    done = run_program(*alone, _BESIDE_DOCKER, name, cwd=Path(__file__).parents[2])
    rule, *error = done.stdout.splitlines()
    assert f"-i rt-{name}-br -o rt-{name}-br" in rule and f'--comment "raypp test bed {name}"' in rule
    said = "\n".join(error)
    assert f"host {name}-h1 cannot reach {name}-h0 (10.77.0.10) over the bridge rt-{name}-br: " in said
    assert "iptables -S FORWARD" in said and "bridge-nf-call-iptables" in said
    assert leftovers(name) == []
