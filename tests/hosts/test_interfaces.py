"""Two ranks on two hosts connect over the right interface or report the wrong one. Without Ray."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beds import bare_bed

from cluster.testbed import Cut, TestBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_PROGRAM = Path(__file__).parent / "joining.py"


@pytest.fixture(scope="module")
def bare() -> Iterator[TestBed]:
    with bare_bed(2, "1gbit") as bed:
        yield bed


def _rank(bed: TestBed, host: int, port: int, **environment: str) -> subprocess.Popen[Any]:
    nodes = [bed.network.address(0), bed.network.address(1)]
    seat = {"rank": host, "node_rank": host, "world_size": 2, "node": nodes[host], "nodes": nodes}
    seat |= {"master_addr": nodes[0], "master_port": port}
    command = [sys.executable, str(_PROGRAM), json.dumps(seat)]
    return bed.popen(host, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _answer(process: subprocess.Popen[Any], patience_s: float = 90) -> tuple[int, str]:
    try:
        return process.wait(patience_s), process.stdout.read() if process.stdout else ""
    finally:
        process.kill()


def test_ranks_meet_over_the_route_between_their_hosts_and_say_so(bare: TestBed) -> None:
    first, second = _rank(bare, 0, 29511), _rank(bare, 1, 29511)
    (code, said), (other_code, other_said) = _answer(first), _answer(second)
    assert (code, other_code) == (0, 0), said + other_said
    here, there = bare.network.address(0), bare.network.address(1)
    assert f"network interface eth0 ({here}, 10 Gbit/s) (on the route to {there}); links {here} – {there}" in said
    assert "sum 2" in said
    assert "sum 2" in other_said


def test_an_interface_that_leads_nowhere_is_named_and_not_hung_on(bare: TestBed) -> None:
    """`lo` stands for any interface whose address means a different machine on the other host."""
    first, second = _rank(bare, 0, 29512), _rank(bare, 1, 29512, GLOO_SOCKET_IFNAME="lo")
    code, said = _answer(first)
    second.kill()
    assert code == 3, said
    here, there = bare.network.address(0), bare.network.address(1)
    assert f"cannot exchange data with {there} at 127.0.0.1 (interface lo there, named by the job's environment" in said
    assert "remove GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME from resources.env" in said
    assert f"on {here} that is eth0" in said


@pytest.mark.parametrize("how", [Cut.BOTH, Cut.OUT, Cut.IN])
def test_a_host_that_cannot_be_reached_is_named_with_the_interface_that_was_tried(bare: TestBed, how: Cut) -> None:
    bare.cut(1, how)
    try:
        code, said = _answer(_rank(bare, 1, 29513))
    finally:
        bare.heal(1)
    assert code == 3, said
    here, there = bare.network.address(1), bare.network.address(0)
    assert f"{here} cannot reach rank 0's node {there}, port 29513, over eth0" in said
    assert "raypp doctor" in said
